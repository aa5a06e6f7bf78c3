"""`python -m kvist_kvmaster`."""

import sys

from kvist.runner import run
from kvist_kvmaster.app import main
from kvist_kvmaster.settings import KvMasterSettings

if __name__ == "__main__":
    sys.exit(run("kvmaster", KvMasterSettings, main))
