"""What is added to the agent, in its order."""

from __future__ import annotations

from vllmops.model.environment import SIGNING_KEY

from ...support.children import Spawn

INSTALL = f"""
import os
from vllmops_responses.server import extension, installation
def fail(_):
    raise ValueError("vLLM has no such module")
installation.replace_routes_on_import = fail
try:
    extension.install()
except ValueError:
    out = {SIGNING_KEY!r} in os.environ
"""


def test_no_child_inherits_a_key_whatever_fails(spawn: Spawn) -> None:
    child = spawn(VLLMOPS_DISABLE="1", **{SIGNING_KEY: "ab" * 32})
    assert child.run(INSTALL) == "False"
