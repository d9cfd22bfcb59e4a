"""A process that loads the agent as vLLM would, then runs what it is sent, a line at a time."""

import ast
import logging
import sys
import traceback

from vllmops.agent import register

logging.basicConfig(level=logging.INFO, format="%(message)s")
register()
print(repr("up"), flush=True)
scope: dict[str, object] = {}
for line in sys.stdin:
    scope["out"] = ""
    try:
        exec(ast.literal_eval(line), scope)
    except Exception:
        scope["out"] = traceback.format_exc()
    print(repr(str(scope["out"])), flush=True)
