"""One dump in all the forms in which people paste it."""

from __future__ import annotations

import re
from collections.abc import Callable

import msgspec

from vllmops.collect.stacks.pasted_text import parse_stacks
from vllmops.model.stacks import Frame, ProcessStacks, ThreadStack

Form = Callable[[str], str]

FRAME = re.compile(r"^    (\S.*) \(([^()]+)\)$", re.MULTILINE)
LIBRARY = "/usr/local/lib/python3.12/dist-packages/"
TEMPLATE = (
    "    void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<long>, "
    "std::array<char*, 1ul> >(int, at::native::FillFunctor<long>) (libtorch_cuda.so)"
)


def each_line(change: Callable[[str], str]) -> Form:
    return lambda text: "\n".join(change(line) for line in text.split("\n"))


def before(prefix: str) -> Form:
    return each_line(lambda line: prefix + line)


def wrap_lines_at(width: int) -> Form:
    """As a terminal does it: after so many characters, wherever that is."""
    return each_line(
        lambda line: "\n".join(line[at : at + width] for at in range(0, max(len(line), 1), width))
    )


def parts(text: str) -> tuple[str, list[str]]:
    """What stands before the processes, and each process."""
    head, *processes = re.split(r"^(?=Process \d+: )", text, flags=re.MULTILINE)
    return head, processes


def add_log_prefix(text: str) -> str:
    """Each process's lines as vLLM logs them, the processes' lines mixed."""
    head, processes = parts(text)
    out = [head]
    for process in processes:
        found = re.match(r"Process (\d+): VLLM::(\w+)", process)
        assert found
        prefix = f"({found[2]} pid={found[1]}) ERROR 11-20 03:12:44 [core.py:1090] "
        out += [prefix + line + "\n" for line in process.splitlines()]
    return "".join(out)


def native(text: str) -> str:
    """With --native: C frames below and between the Python ones."""
    text = re.sub(r"(\n    <module> \(<string>:1\))", r"\1\n    0x7f83326a71f5 (libc.so.6)", text)
    eval_ = "    _PyEval_EvalFrameDefault (python3.12)"
    text = re.sub(r"(\n    \S*(?:step\w*|run_busy_loop) \()", rf"\n{eval_}\1", text)
    return re.sub(r"(\n    \S*_WorkItem.run \()", rf"\n{TEMPLATE}\1", text)


def with_locals(text: str) -> str:
    return FRAME.sub(
        lambda found: (
            f"{found[0]}\n        Arguments:\n            self: <Engine at 0x7f83323043d0>\n"
            '        Locals:\n            message: "popitem (vllm/utils/cache.py:190)"\n'
            "            count: 3"
        ),
        text,
    )


def bare(text: str) -> str:
    """As older versions print it: no classes."""
    return re.sub(
        r"^    (?:[\w<>]+\.)+(<?\w+>?) \((.*\.py)", r"    \1 (\2", text, flags=re.MULTILINE
    )


def elide_paths(dots: str) -> Form:
    return lambda text: re.sub(r" \((?:[\w.-]+/)+([\w.]+\.py:)", rf" ({dots}/\1", text)


def processes_of(text: str) -> list[ProcessStacks]:
    return [process for sample in parse_stacks(text).samples for process in sample.processes]


def py_spy_json(text: str) -> str:
    """What `py-spy dump --json` prints, one document for each process."""

    def frame(item: Frame) -> dict[str, object]:
        return {
            "name": item.function,
            "filename": LIBRARY + item.file,
            "module": None,
            "short_filename": item.short_file,
            "line": item.line or 0,
            "locals": None,
            "is_entry": True,
        }

    def thread(process: ProcessStacks, item: ThreadStack) -> dict[str, object]:
        return {
            "pid": process.pid,
            "thread_id": 140202,
            "thread_name": item.name,
            "os_thread_id": item.tid,
            "active": item.state == "active",
            "owns_gil": item.owns_gil,
            "frames": [frame(frame_) for frame_ in item.frames],
            "process_info": {"pid": process.pid, "ppid": 1, "command_line": process.title},
        }

    return "\n".join(
        msgspec.json.encode([thread(process, item) for item in process.threads]).decode()
        for process in processes_of(text)
    )


def ours(text: str) -> str:
    """What `stacks dump` prints."""
    lines: list[str] = []
    for process in processes_of(text):
        lines.append(f"{process.title.removeprefix('VLLM::')} pid {process.pid}")
        for thread in process.threads:
            gil = ", holds the GIL" if thread.owns_gil else ""
            lines.append(f"  {thread.name}: {thread.state}{gil}")
            lines += [
                f"    {item.function} ({item.short_file}{f':{item.line}' if item.line else ''})"
                for item in thread.frames
            ]
        lines.append("")
    return parts(text)[0] + "\n".join(lines)


def format_faulthandler_frame(item: Frame) -> str:
    file = item.file if item.file.startswith("<") else LIBRARY + item.file
    return f'  File "{file}", line {item.line or "???"} in {item.function.rpartition(".")[2]}'


def faulthandler(text: str) -> str:
    """Files of a watchdog, shown one after the other: the main thread last, no states."""
    lines: list[str] = [parts(text)[0]]
    for process in processes_of(text):
        name = process.title.removeprefix("VLLM::")
        lines.append(f"==> dump/VLLM_STACK_DUMP_for_{name}_{process.pid}.log <==")
        lines.append("\nCall stack dump #1 at Fri Nov 20 03:12:44 2026 due to feed timeout\n")
        for thread in reversed(process.threads):
            lines.append(f"Thread 0x{thread.tid or 0:016x} (most recent call first):")
            lines += [format_faulthandler_frame(item) for item in thread.frames if item.line]
            lines.append("")
        lines.append("=" * 64)
    return "\n".join(lines)


def gdb(text: str) -> str:
    """`thread apply all py-bt` and some C frames."""
    lines: list[str] = [parts(text)[0]]
    for process in processes_of(text):
        name = process.title.removeprefix("VLLM::")
        lines.append(f"{name} (pid {process.pid})")
        for index, thread in enumerate(process.threads, 1):
            address = f"Thread 0x7f{index:010x} (LWP {thread.tid})"
            lines.append(f'\nThread {index} ({address} "{name[:15]}"):')
            for number, item in enumerate(thread.frames):
                function = item.function.rpartition(".")[2] if item.line else item.function
                lines.append(
                    f"#{number}  Frame 0x7f2c, for file {LIBRARY}{item.file}, line {item.line}, "
                    f"in {function} (self=<Engine(a=1) at remote 0x7f>, block=True)"
                    if item.line
                    else f"#{number}  0x00007f1c in {function} () from /usr/lib/{item.file}"
                )
    return "\n".join(lines)


FORMS: dict[str, Form] = {
    "as py-spy prints it": str,
    "Windows line ends": lambda text: text.replace("\n", "\r\n"),
    "terminal colours": each_line(lambda line: f"\x1b[0;36m{line}\x1b[0m\x1b[K"),
    "colours without their escape": each_line(lambda line: f"[1;32m{line}[0m"),
    "fenced": lambda text: f"it hangs:\n\n```text\n{text}```\n\nany idea?\n",
    "quoted": before("> "),
    "quoted twice": before("> > "),
    "fenced in a quote": lambda text: before("> ")(f"```\n{text}\n```"),
    "indentation lost": each_line(str.strip),
    "tabs": lambda text: text.replace("    ", "\t"),
    "on one line": lambda text: " ".join(text.split()),
    "on one line, escaped": lambda text: text.replace('"', '\\"').replace("\n", "\\n"),
    "wrapped at 80": wrap_lines_at(80),
    "wrapped at 60": wrap_lines_at(60),
    "wrapped at 45": wrap_lines_at(45),
    "elided paths": elide_paths("..."),
    "elided paths, one sign": elide_paths("…"),
    "full paths": lambda text: re.sub(r" \(((?:[\w.-]+/)+\w+\.py:)", rf" ({LIBRARY}\1", text),
    "no classes": bare,
    "vLLM's log prefix": add_log_prefix,
    "journald": before("Nov 20 03:12:44 gpu-07 vllm[4070]: "),
    "docker logs -t": before("2026-11-20T03:12:44.123456789Z "),
    "docker compose": before("vllm-1  | "),
    "kubectl logs --prefix": before("[pod/vllm-0/vllm] "),
    "containerd": before("2026-11-20T03:12:44.123456789Z stderr F "),
    "numbers of Kubernetes and vLLM": lambda text: before("2026-11-20T03:12:44.1Z ")(
        add_log_prefix(text)
    ),
    "threads without a name": lambda text: re.sub(
        r'^(Thread \d+ \(\w+\)): ".*"$', r"\1", text, flags=re.MULTILINE
    ),
    "holder of the GIL": lambda text: text.replace("(active)", "(active+gil)"),
    "hexadecimal ids": lambda text: re.sub(
        r"^Thread (\d+)", lambda found: f"Thread {int(found[1]):#x}", text, flags=re.MULTILINE
    ),
    "native": native,
    "locals": with_locals,
    "locals, quoted": lambda text: before("> ")(with_locals(text)),
    "py-spy's JSON": py_spy_json,
    "stacks dump": ours,
    "stacks dump, narrow": lambda text: wrap_lines_at(60)(ours(text)),
    "faulthandler": faulthandler,
    "faulthandler, wrapped": lambda text: wrap_lines_at(80)(faulthandler(text)),
    "faulthandler, indentation lost": lambda text: each_line(str.strip)(faulthandler(text)),
    "gdb": gdb,
    "gdb, wrapped": lambda text: wrap_lines_at(100)(gdb(text)),
    "everything at once": lambda text: before("> ")(
        each_line(lambda line: f"\x1b[36m{line}\x1b[0m")(wrap_lines_at(70)(elide_paths("…")(text)))
    ).replace("\n", "\r\n"),
}
# Only what a form can carry is compared: JSON has no log lines.
WITHOUT_LOG = {"py-spy's JSON"}
WITHOUT_NATIVE = {form for form in FORMS if form.startswith("faulthandler")}
WITHOUT_GIL = {form for form in FORMS if form.startswith(("faulthandler", "gdb"))}
