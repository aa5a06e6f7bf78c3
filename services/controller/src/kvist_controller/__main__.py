"""`python -m kvist_controller`."""

import sys

from kvist.runner import run
from kvist_controller.app import main
from kvist_controller.settings import ControllerSettings

if __name__ == "__main__":
    sys.exit(run("controller", ControllerSettings, main))
