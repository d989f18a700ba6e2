"""The public surface and all counts are as recorded. A change here needs a line in the changelog.

`python tests/golden/golden.py --surface` writes both files anew.
"""

import json

from tests.golden.golden import COUNTS, SURFACE, counts, surface


def test_commands_options_and_public_names_are_as_recorded():
    assert surface() == json.loads(SURFACE.read_text())


def test_every_network_costs_what_it_did():
    assert counts() == json.loads(COUNTS.read_text())
