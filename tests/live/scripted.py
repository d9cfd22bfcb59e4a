"""A real server whose model says what a test wants: agents end only where a model calls tools.

A logits processor, vLLM's own way to steer a model, lets through the tokens of a script alone.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from .clients import MODEL
from .conftest import Cli, Live, code_of

PROCESSOR = """
import fcntl, json, os
from transformers import AutoTokenizer
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor


def register():
    pass


class Scripted(AdapterLogitsProcessor):
    def __init__(self, config, device, is_pin_memory):
        super().__init__(config, device, is_pin_memory)
        self.tokenizer = AutoTokenizer.from_pretrained(config.model_config.tokenizer)

    def is_argmax_invariant(self):
        return False

    def new_req_logits_processor(self, params):
        if params.max_tokens == 1:  # what only fills the prefix cache
            return None
        with open(os.environ["SCRIPT"], "r+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            texts = json.load(file)
            if not texts:
                return None
            file.seek(0)
            file.truncate()
            json.dump(texts[1:], file)
        tokens = self.tokenizer.encode(texts[0], add_special_tokens=False)
        end = self.tokenizer.eos_token_id

        def let_through(output, logits):
            keep = tokens[len(output)] if len(output) < len(tokens) else end
            logits[:] = float("-inf")
            logits[keep] = 0
            return logits

        return let_through
"""
# The prompt of an agent is long, and the demo's tokens are short.
LENGTH = 131_072


class Script:
    """A server, and what its model says next.

    Args:
        server: the server.
        file: from which its processor reads.
    """

    def __init__(self, server: Live, file: Path) -> None:
        self.server = server
        self.file = file

    @property
    def base(self) -> str:
        """The URL of its API."""
        return f"{self.server.url}/v1"

    def say(self, *texts: str) -> None:
        """Have the next requests answered by these texts, each by one."""
        self.file.write_text(json.dumps(texts))

    def call(self, name: str, **arguments: object) -> str:
        """A call of a tool, as the parser of the server reads it."""
        return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"

    @property
    def pending_texts(self) -> list[str]:
        """The texts that no request has used yet."""
        texts: list[str] = json.loads(self.file.read_text())
        return texts


@contextmanager
def serve_script(
    cli: Cli, plug_in: Callable[[str, str], Path], folder: Path, *words: str
) -> Iterator[Script]:
    """A demo text model with a long context, which says what a script says.

    Args:
        cli: starts it.
        plug_in: writes a plug-in.
        folder: an empty one.
        words: more options of vLLM.
    """
    file, model = folder / "script.json", folder / "model"
    file.write_text("[]")
    shutil.copytree(find_demo(cli), model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "max_position_embeddings": LENGTH}))
    code = code_of(cli, plug_in("scripted", PROCESSOR))
    options = (*code, "--env", f"SCRIPT={file}", "--env", "HF_HUB_OFFLINE=1")
    vllm = (
        *("--served-model-name", MODEL, "--enforce-eager", "--dtype", "float32"),
        *("--max-model-len", str(LENGTH), "--kv-cache-memory-bytes", str(1 << 30)),
        *("--enable-auto-tool-choice", "--tool-call-parser", "hermes"),
        *("--logits-processors", "scripted:Scripted"),
    )
    made = cli.serve("scripted", str(model), *options, "--", *vllm, *words)
    try:
        yield Script(made, file)
    finally:
        cli("stop", made.name, "--force")


def find_demo(cli: Cli) -> Path:
    """The folder of the demo text model, which a start of it has made."""
    ran = cli("serve", "--demo", "text", "--dry-run", "--json")
    assert ran.code == 0, ran.err
    return Path(ran.data["model"])
