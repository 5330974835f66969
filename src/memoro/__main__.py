"""`python -m memoro` is the command line."""

from memoro.cli import main

if __name__ == "__main__":
    main()
