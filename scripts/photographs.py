"""Makes the statistics of photographs that ship with memoro-tiny.

    python scripts/photographs.py imagenet1k_samples.zip

The file holds the mean and the principal directions of pooled statistics, no images.
"""

from __future__ import annotations

import argparse

import memoro
from memoro.backbones.load import WEIGHTS
from memoro.evaluation.calibrate import FILE, read_photographs, write_photographs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("photographs", help="a folder or .zip of photographs of anything")
    options = parser.parse_args()
    backbone = memoro.load_backbone("memoro-tiny")
    others = read_photographs(backbone, backbone.preprocessing, options.photographs, None, workers=0)
    write_photographs(WEIGHTS / FILE, others, backbone, backbone.preprocessing)
    print(f"{WEIGHTS / FILE}: {(WEIGHTS / FILE).stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
