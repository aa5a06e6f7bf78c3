"""`python -m kvist_agent`."""

import sys

from kvist.runner import run
from kvist_agent.app import main
from kvist_agent.settings import AgentSettings

if __name__ == "__main__":
    sys.exit(run("agent", AgentSettings, main))
