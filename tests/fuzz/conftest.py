"""Let the tests import the harness beside them, which is a program too."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
