"""Speed, as ratios within one run: `make bench`, or `python -m tests.benchmarks NAME...` for some. Never a test."""
