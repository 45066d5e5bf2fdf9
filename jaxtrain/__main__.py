"""`python -m jaxtrain VERB ...`."""

import sys

from jaxtrain.cli import main

if __name__ == "__main__":
    sys.exit(main())
