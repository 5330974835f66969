"""memoro teach: labels a folder of photographs, learns meanwhile, and serves what it learned."""
