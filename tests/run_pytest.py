"""Main program of every py_test in BUILD: runs pytest on the files it is given."""

import sys

import pytest

if __name__ == "__main__":
    sys.exit(pytest.main(sys.argv[1:]))
