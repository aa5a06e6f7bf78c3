"""`python -m kvist_router`."""

import sys

from kvist.runner import run
from kvist_router.app import main
from kvist_router.settings import RouterSettings

if __name__ == "__main__":
    sys.exit(run("router", RouterSettings, main))
