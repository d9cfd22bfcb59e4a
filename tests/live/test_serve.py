"""Starting a real vLLM: what it refuses, and what the environment decides."""

from __future__ import annotations

from .conftest import Cli
from .test_cache import show_three, told_as


def test_vllm_says_itself_what_is_wrong_with_its_arguments(cli: Cli) -> None:
    ran = cli("serve", "--demo", "text", "--name", "wrong", "--", "--frobnicate")
    assert ran.code == 1
    last = ran.err[ran.err.index("error:") :]
    assert last.startswith("error: unrecognized arguments: --frobnicate")
    assert str(cli.home / "instances/wrong/server.log") in last
    assert "Traceback" not in last


def test_the_agent_joins_an_allow_list_and_a_restart_keeps_it(cli: Cli) -> None:
    plug_in = ("--env", "VLLM_PLUGINS=somebody_elses")
    words = ("--demo", "vision", *plug_in, "--", "--mm-processor-cache-gb", "0")
    server = cli.serve("plugins", *words)
    try:
        before = server.row
        assert {p["agent"] for p in before["processes"] if p["role"] != "other"} == {"answers"}
        ran = cli("restart", "plugins", "--json")
        assert ran.code == 0, ran.err
        assert ran.data["environment"]["VLLM_PLUGINS"] == "somebody_elses,vllmops"
        after = server.row
        assert after["port"] == before["port"]
        assert after["pid"] != before["pid"]
        show_three(server)
        told_as(server, "cache-off", {"encoder"})
    finally:
        cli("stop", "plugins", "--force")
