"""A real server by its URL and its admin token: what every command gives by the server's name."""

from __future__ import annotations

from typing import Any

from .conftest import Live, Ran
from .test_cache import inspect_quiet_caches, send_image_request

# What of doctor's is of the machine, which is not seen from elsewhere.
OF_THE_MACHINE = (
    *("machine.", "gpu.", "security.", "tools."),
    *("responses.store-in-memory", "process.orphaned"),
)


def run_by_name_and_url(server: Live, *words: str) -> tuple[Ran, Ran]:
    """What a command gives by the name, and from elsewhere."""
    here = server.cli(*words, "-t", server.name, "--json")
    there = server.cli(
        *words, "-t", server.url, "--admin-token", str(server.home / "admin.token"), "--json"
    )
    assert there.code == here.code, (here, there)
    return here, there


def rows(data: Any, *fields: str) -> list[tuple[Any, ...]]:
    return [tuple(row.get(field) for field in fields) for row in data]


def test_every_command_gives_from_elsewhere_what_it_gives_by_name(vision_server: Live) -> None:
    server = vision_server
    send_image_request(server.url, 1, 2, 3).raise_for_status()
    inspect_quiet_caches(server)

    here, there = run_by_name_and_url(server, "ps")
    (by_name,), (by_url,) = here.data["instances"], there.data["instances"]
    about: tuple[str, ...] = (
        "role",
        "pid",
        "agent",
        "node",
        "dp_rank",
        "tp_rank",
        "pp_rank",
        "ranks",
    )
    assert rows(by_url["processes"], *about) == rows(by_name["processes"], *about)
    same = ("state", "model", "url", "port")
    assert rows([by_url], *same) == rows([by_name], *same)
    assert abs(by_url["uptime_s"] - by_name["uptime_s"]) < 60
    assert abs(by_url["rss_bytes"] / by_name["rss_bytes"] - 1) < 0.1

    here, there = run_by_name_and_url(server, "status")
    for field in ("engines", "caches", "patches"):
        assert there.data[field] == here.data[field], field

    here, there = run_by_name_and_url(server, "cache", "inspect", "--keys")
    for field in ("caches", "findings", "notes", "silent", "problems", "quiet"):
        assert there.data[field] == here.data[field], field
    assert any(row["kind"] == "mm-lru" and row["entries"] >= 3 for row in there.data["caches"])

    here, there = run_by_name_and_url(server, "cache", "compare")
    for field in ("pairs", "findings", "silent"):
        assert there.data[field] == here.data[field], field
    assert there.data["pairs"]

    here, there = run_by_name_and_url(server, "cache", "repair")
    for field in ("repairs", "silent", "findings"):
        assert there.data[field] == here.data[field], field

    here, there = run_by_name_and_url(server, "patches", "list")
    for field in ("vllm_versions", "patches", "silent"):
        assert there.data[field] == here.data[field], field

    here, there = run_by_name_and_url(
        server, "keys", "status", "--keyring", str(server.home / "soaked.json")
    )
    for field in ("stage", "keys"):
        assert there.data[field] == here.data[field], field
    kept = ("role", "pid", "keyring", "up_to_date")
    assert rows(there.data["servers"], *kept) == rows(here.data["servers"], *kept)

    here, there = run_by_name_and_url(server, "stacks", "dump")
    # There is no agent in the processes that vLLM starts beside, such as a resource tracker.
    known = [p for p in here.data["processes"] if p["role"] != "other"]
    titles = ("role", "pid", "title", "ranks")
    assert rows(there.data["processes"], *titles) == rows(known, *titles)
    for by_agent, by_pyspy in zip(there.data["processes"], known, strict=True):
        names = [
            {thread["name"] for thread in process["threads"] if thread["frames"]}
            for process in (by_agent, by_pyspy)
        ]
        assert {"MainThread", "vllmops-agent"} <= names[0] & names[1]
    here, there = run_by_name_and_url(
        server, "stacks", "dump", "--explain", "--samples", "2", "--interval", "0.2"
    )
    assert there.data["verdict"] == here.data["verdict"]

    here, there = run_by_name_and_url(server, "doctor", "--fail-on", "error")
    codes = [
        {f["code"] for f in ran.data["findings"] if not f["code"].startswith(OF_THE_MACHINE)}
        for ran in (here, there)
    ]
    assert codes[0] == codes[1]
    assert there.data["vllm_version"] == here.data["vllm_version"]
    assert {part["code"] for part in there.data["unseen"]} - {
        part["code"] for part in here.data["unseen"]
    } <= {"remote"}

    here, there = run_by_name_and_url(server, "wait", "--for", "ready", "--timeout", "5")
    here, there = run_by_name_and_url(
        server,
        *("memory", "record", "--interval", "0.5", "--duration", "1", "--tolerance", "10G"),
    )
    for ran in (here, there):
        last = ran.data["samples"][-1]
        assert all(process["rss_bytes"] for process in last["processes"])
        assert any((process["agent"] or {}).get("caches") for process in last["processes"])

    here, there = run_by_name_and_url(server, "watch", "--for", "1")
    here, there = run_by_name_and_url(server, "cache", "reset")
    after = inspect_quiet_caches(server)
    assert all(row["entries"] == 0 for row in after["caches"] if row["kind"] == "mm-lru")
