"""Which lines of a server's log are of vLLM, or of what it stands on, and which are anybody's.

An application that runs in a server (middleware, a plug-in, a custom model) logs what it likes, in
a form of its own, and what clients sent is often part of it.
"""

from __future__ import annotations

import re

# vLLM puts the process before whatever is written in it.
PROCESS = re.compile(r"(?:\([\w.-]+ (?:\w+=\S+ ?)?pid=\d+(?:, ip=[\d.:]+)?\) ?)?")
VLLM = r"[A-Z]+ \d\d-\d\d \d\d:\d\d:\d\d(?:[.,]\d+)? \[[^\]]*\]"
# Applications log in uvicorn's name, too: only what it says itself.
UVICORN = (
    r"[A-Z]{4,8}: {1,8}(?:[\w.:\[\]]+ - \"[A-Z]+ \S* ?HTTP/[\d.]+\" \d{3}|Started |Waiting for |"
    r"Application (?:startup|shutdown)|Uvicorn running |Shutting down|Finished server |Stopping |"
    r"Exception in ASGI application|Invalid HTTP request|connection (?:open|closed)|Cancel \d)"
)
LOGGER = r"(?:vllm|uvicorn)(?:\.\w+)*"  # where --log-config or VLLM_LOGGING_CONFIG_PATH name it
NAMED = (
    rf"[^\"'{{]{{0,60}}(?<![\w.]){LOGGER}[\]:) ]|\{{.{{0,200}}\"\w*(?:name|logger)\": ?\"{LOGGER}\""
)
NATIVE = (
    r"(?:\[rank\d+\]:)?\[?[IWEFVC]\d{4} \d\d:\d\d:\d\d|\S+:\d+:\d+ \[\d+\] NCCL |\[Gloo\] "
    r"|NCCL version |terminate called |  what\(\): |Aborted|Killed|Segmentation fault|Bus error"
    r"|double free |free\(\): |malloc|corrupted |munmap_chunk|\*{3} |!{3,}"
)
PYTHON = (
    r"Process \S+:$|\S+\.py:\d+: \w*Warning: |Fatal Python error: |Python runtime state: "
    r"|(?:Current thread|Thread) 0x[0-9a-f]+.*\(most recent call first\):|Extension modules: "
    r"|  File \"[^\"]+\", line \d+ in |  <no Python frame>|  \.\.\.$|[\w.-]+: error: "
    r"|(?:During handling of the above exception|The above exception was the direct cause)"
    r"|.*\[type=\w+, input_value=|\s*For further information visit "
)
OWN = (
    r"Failed to load plugin \S+$|Triton is |\[lines left out, and maybe some twice\]"
    r"|(?:Loading|Capturing|Compiling|Profiling|Warming|Adding|Processed|Multi-thread)[\w ().:-]*"
    r" \d+%[^\"']*\|"
)
KNOWN = re.compile(rf"(?:{VLLM}|{UVICORN}|{NAMED}|{NATIVE}|{PYTHON}|{OWN})|\s*$")
# What goes on with indented lines.
BLOCK = re.compile(r"[ +|]*(?:Exception Group )?Traceback \(most recent call last\):|usage: ")
RAISED = re.compile(
    r"(?:(?:[a-z_]\w*\.)+[A-Z]\w*"
    r"|(?:[A-Z]\w*)?(?:Error|Exception|Warning|Exit|Interrupt|Iteration|Group|Timeout|Failure))"
    r"(?:: |:?$)"
)
# Time and level of a line that is not known.
HEAD = re.compile(
    r"(?:[\[<(]?(?:\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d[\d.,Z+:-]*|\d\d:\d\d:\d\d[\d.,]*"
    r"|TRACE|DEBUG|INFO|WARN(?:ING)?|ERROR|CRITICAL|FATAL)[\])>]?[ \t:|-]{1,8}){0,3}"
)


class LogLineClassifier:
    """Tells what of each line of a log may stay, one after the other."""

    def __init__(self) -> None:
        self.processes_in_block: set[str] = set()  # processes in the midst of a block

    def compute_known_length(self, line: str) -> int:
        """How much of a line is known: all its characters, or those before what anybody wrote."""
        match = PROCESS.match(line)
        assert match is not None  # all of it is optional
        process, at = match.group(), match.end()
        if BLOCK.match(line, at):
            self.processes_in_block.add(process)
            return len(line)
        if process in self.processes_in_block:
            if line[at : at + 1].isspace():
                return len(line)
            self.processes_in_block.discard(process)
            if RAISED.match(line, at):
                return len(line)
        if KNOWN.match(line, at):
            return len(line)
        head = HEAD.match(line, at)
        assert head is not None  # all of it is optional
        return head.end()
