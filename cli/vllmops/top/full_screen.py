"""The full screen of ``vllmops top``.

All looks are taken in threads of `FollowedServers`; this shows what they have kept, once a second.
Whatever comes from a server is shown by `make_plain_text`, so that no text of it is taken for
markup or obeyed by the terminal.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from contextvars import copy_context
from typing import ClassVar, TypeVar

from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.css.query import NoMatches
from textual.screen import ModalScreen
from textual.widget import Widget
from textual.widgets import (
    DataTable,
    Footer,
    Input,
    RichLog,
    Sparkline,
    Static,
    TabbedContent,
    TabPane,
    Tree,
)
from textual.widgets.tree import TreeNode

from ..model.ranks import format_role_and_ranks
from ..support.errors import VllmopsError
from ..support.numbers import format_count
from ..support.output import IndentedLine
from ..support.streams import clean_log_text, make_printable
from . import finding_events, key_bindings, plain_screen, table_rows
from .finding_events import FindingEvent
from .key_bindings import VllmopsCommand
from .server_followers import FollowedServers, ServerFollower
from .table_rows import ProcessRow, ServerRow

REFRESH_S = 1.0
SPARKS = 25  # values of a sparkline, one for each column
MOST_REQUESTS = 200
COLUMNS = ("request", "state", "age", "prompt", "output")
FIGURES = {"tokens_per_s": "tokens/s", "running": "running", "waiting": "waiting", "kv": "KV"}
# What a row of the tree is about: a server, and in it a node and a process.
Key = tuple[str, str, int]
W = TypeVar("W", bound=Widget)


def make_plain_text(text: str, style: str = "") -> Text:
    """Text of a server, on one line."""
    return Text(make_printable(text, lines=False), style, no_wrap=True, overflow="ellipsis")


def make_wrapped_text(lines: Iterable[IndentedLine]) -> Text:
    """Lines of text of a server, as long as they are."""
    made = Text()
    for line in lines:
        made.append(f"{' ' * line.indent}{make_printable(line.text, lines=False)}\n", line.style)
    return made


class Confirm(ModalScreen[bool]):
    """Asks whether to run a command."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("y", "dismiss(True)", "Run it"),
        Binding("n,escape,q", "dismiss(False)", "Do not"),
    ]

    def __init__(self, action: VllmopsCommand) -> None:
        super().__init__()
        self.command = action

    def compose(self) -> ComposeResult:
        lines = (
            IndentedLine(0, f"{self.command.does}?", "bold"),
            IndentedLine(0, ""),
            IndentedLine(0, f"$ {self.command.command_line}"),
            IndentedLine(0, ""),
            IndentedLine(0, "y runs it, n does not"),
        )
        yield Static(make_wrapped_text(lines), classes="box", markup=False)


class Output(ModalScreen[None]):
    """Shows a command, and what it prints once it has ended."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,q", "dismiss(None)", "Close")]

    def __init__(self, action: VllmopsCommand) -> None:
        super().__init__()
        self.command = action

    def compose(self) -> ComposeResult:
        with VerticalScroll(classes="box"):
            yield Static(
                make_wrapped_text([IndentedLine(0, f"$ {self.command.command_line}", "bold")]),
                markup=False,
            )
            yield Static("it runs; q closes this window, and does not end it", id="state")
            yield Static(id="printed", markup=False)

    def show_output(self, code: int, text: str) -> None:
        """Show what the command printed."""
        self.query_one("#state", Static).update(f"exit code {code}; q closes this window")
        self.query_one("#printed", Static).update(Text(clean_log_text(text)))


class TopApp(App[None]):
    """The application.

    Args:
        board: what is shown; it begins and ends with the application.
        clock: seconds since the epoch.
        monotonic: the clock of looks.
    """

    TITLE = "vllmops top"
    ENABLE_COMMAND_PALETTE = False
    CSS = """
    #title { height: 1; background: $panel; }
    #upper { height: 12; }
    #servers { width: 1fr; padding: 0; }
    #figures { width: 26; padding: 0 0 0 1; }
    #figures Static { height: 1; }
    #figures Sparkline { height: 1; }
    #figures #caches { height: 1fr; }
    TabbedContent, ContentSwitcher, TabPane { height: 1fr; }
    TabPane { padding: 0; }
    DataTable { height: 1fr; }
    RichLog { height: 1fr; }
    #filter { height: 1; border: none; padding: 0; }
    Confirm, Output { align: center middle; }
    .box { width: 76; height: auto; max-height: 20; padding: 1 2; background: $surface;
           border: solid $primary; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q", "quit", "Quit"),
        # Textual's own copies text, and says how to quit.
        Binding("ctrl+c", "quit", show=False, priority=True),
        Binding("d", "doctor", "Doctor"),
        Binding("b", "bundle", "Bundle"),
        Binding("h", "heal", "Heal"),
        Binding("x", "drain", "Drain"),
        Binding("u", "resume", "Resume"),
        Binding("a", "abort", "Abort"),
        Binding("s", "stacks", "Stacks"),
        Binding("f", "tab('findings')", "Findings", show=False),
        Binding("r", "tab('requests')", "Requests", show=False),
        Binding("l", "tab('log')", "Log", show=False),
        Binding("slash", "filter", "Filter log"),
    ]

    def __init__(
        self,
        board: FollowedServers,
        *,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__()
        self.animation_level = "none"  # each step of an animation goes over ssh
        self.board = board
        self.clock = clock
        self.monotonic = monotonic
        self.servers: list[ServerRow] = []
        self.events: tuple[FindingEvent, ...] = ()
        self.keys: list[Key] = []
        self.nodes: dict[Key, TreeNode[Key]] = {}
        self.labels: dict[Key, Text] = {}
        self.shown_requests: tuple[object, ...] = ()
        self.shown_log: tuple[str, int, str] = ("", 0, "")
        self.shown_texts: dict[str, Text] = {}

    # -- what is on it -----------------------------------------------------------------------

    def compose(self) -> ComposeResult:
        yield Static(id="title", markup=False)
        with Horizontal(id="upper"):
            tree: Tree[Key] = Tree("servers", id="servers")
            tree.show_root = False
            tree.guide_depth = 2
            yield tree
            with Vertical(id="figures"):
                for name in FIGURES:
                    yield Static(id=f"{name}-now", markup=False)
                    yield Sparkline(id=name)
                yield Static(id="caches", markup=False)
        with TabbedContent(initial="findings"):
            with TabPane("Findings (f)", id="findings"), VerticalScroll():
                yield Static(id="told", markup=False)
            with TabPane("Requests (r)", id="requests"):
                table: DataTable[Text] = DataTable(cursor_type="row", id="in-flight")
                yield table
            with TabPane("Stacks (s)", id="stacks"), VerticalScroll():
                yield Static("s takes the stacks of the chosen process", id="frames", markup=False)
            with TabPane("Log (l)", id="log"):
                yield Input(placeholder="/ filters lines", id="filter", compact=True)
                yield RichLog(max_lines=1000, wrap=True, min_width=20, id="lines", markup=False)
        yield Footer(show_command_palette=False, compact=True)

    def on_mount(self) -> None:
        self.get_main_widget("#in-flight", DataTable).add_columns(*COLUMNS)
        self.get_main_widget("#servers").focus()
        self.board.start_following()
        self.set_interval(REFRESH_S, self.refresh_rows)

    def on_resize(self) -> None:
        self.call_after_refresh(self.refresh_rows)  # once all have their places

    def on_unmount(self) -> None:
        self.board.stop_following()

    def get_main_widget(self, selector: str | type[W], kind: type[W] = Widget) -> W:  # type: ignore[assignment]
        """A part of the full screen, also while a window is in front of it."""
        main = self.screen_stack[0]
        return (
            main.query_one(selector, kind)
            if isinstance(selector, str)
            else main.query_one(selector)
        )

    # -- showing -----------------------------------------------------------------------------

    def refresh_rows(self) -> None:
        """Show what the looks have kept."""
        now_s = self.monotonic()
        followers = list(self.board.followers.items())
        self.servers = [
            table_rows.make_server_row(name, each.samples, now_s) for name, each in followers
        ]
        self.events = finding_events.update_events(self.events, self.servers, self.clock())
        with suppress(NoMatches):  # as the screen is taken down, timers and events still come
            self.show_title()
            self.show_tree()
            self.show_selected()

    def update_text(self, selector: str, text: Text) -> None:
        """Change a text of the screen, if it is another one."""
        if self.shown_texts.get(selector) != text:
            self.shown_texts[selector] = text
            self.get_main_widget(selector, Static).update(text)

    def show_title(self) -> None:
        bad = sum(row.severity == "error" for row in self.servers)
        parts = [format_count(len(self.servers), "server")]
        parts += [f"{bad} in trouble"] if bad else []
        parts += [f"trouble: {text}" for text in self.board.failures]
        now = time.strftime("%H:%M:%S", time.localtime(self.clock()))
        self.update_text(
            "#title", make_plain_text(f"vllmops top  {now}  {', '.join(parts)}", "bold")
        )

    def show_tree(self) -> None:
        """Show servers, nodes and processes; what is chosen stays chosen."""
        labels = dict(make_tree_rows(self.servers))
        tree: Tree[Key] = self.get_main_widget("#servers", Tree)
        if not (width := tree.scrollable_content_region.width):
            return  # it has no place yet
        chosen, has_other_rows = self.selected_key, [*labels] != self.keys
        if has_other_rows:
            tree.clear()
            self.nodes, self.keys = {}, [*labels]
            for key, label in labels.items():
                target, node, pid = key
                above = self.nodes.get((target, node, 0)) or self.nodes.get((target, "", 0))
                add = (above or tree.root).add_leaf if pid else (above or tree.root).add
                self.nodes[key] = add(label, data=key)
                self.nodes[key].expand()
        for key, label in labels.items():
            row = self.nodes[key]
            label.truncate(
                width - tree.guide_depth * compute_label_indent(row), overflow="ellipsis"
            )
            if self.labels.get(key) != label:
                row.set_label(label)
        self.labels = labels
        if has_other_rows:
            found = self.nodes.get(chosen) if chosen else None
            tree.get_node_at_line(0)  # gives each row its line, which the cursor is moved to
            tree.move_cursor(found or next(iter(self.nodes.values()), None))

    @property
    def selected_key(self) -> Key | None:
        """What is chosen in the tree; the first server if nothing is."""
        node = self.get_main_widget("#servers", Tree).cursor_node
        if node is not None and node.data is not None:
            found: Key = node.data
            return found
        return self.keys[0] if self.keys else None

    @property
    def selected_server(self) -> tuple[ServerRow, ServerFollower] | None:
        """The chosen server; None where there is none."""
        key = self.selected_key
        row = next((row for row in self.servers if key and row.target == key[0]), None)
        follower = self.board.followers.get(row.target) if row else None
        return (row, follower) if row and follower else None

    def on_tree_node_highlighted(self) -> None:
        with suppress(NoMatches):
            self.show_selected()

    def show_selected(self) -> None:
        """Show what is known of the chosen server."""
        found = self.selected_server
        if found is None:
            text = Text("no vLLM server runs here" if not self.board.targets else "looking")
            self.update_text("#told", text)
            return
        row, follower = found
        self.show_figures(row, follower)
        self.show_findings(row)
        self.show_requests(row)
        active = self.get_main_widget(TabbedContent).active
        for each in self.board.followers.values():
            each.reads_log = each is follower and active == "log"
        if active == "log":
            self.show_log(follower)

    def show_figures(self, row: ServerRow, follower: ServerFollower) -> None:
        values = table_rows.make_sparkline_series(follower.samples)
        figures = row.figures
        shown = {
            "tokens_per_s": format_number(figures.tokens_per_s),
            "running": format_number(figures.running),
            "waiting": format_number(figures.waiting),
            "kv": plain_screen.format_percent(figures.kv),
        }
        for name, label in FIGURES.items():
            self.update_text(f"#{name}-now", make_plain_text(f"{label} {shown[name]}"))
            line = self.get_main_widget(f"#{name}", Sparkline)
            if line.data != (last := make_sparkline_data(values[name])):
                line.data = last
        shares = (("prefix hits", figures.prefix_hits), ("multimodal hits", figures.mm_hits))
        lines = [
            IndentedLine(0, f"{name} {value:.0%}") for name, value in shares if value is not None
        ]
        lines += [IndentedLine(0, plain_screen.format_cache(each)) for each in row.caches]
        self.update_text("#caches", make_wrapped_text(lines))

    def show_findings(self, row: ServerRow) -> None:
        """All servers' findings, and what could not be seen of the chosen one."""
        lines = [line for event in self.events for line in render_event(event)]
        if not self.events:
            lines.append(IndentedLine(0, "no findings so far; d runs doctor, which looks closer"))
        for part in row.gaps:
            names = dict.fromkeys((row.target, part.part))  # of the server itself, one
            lines.append(IndentedLine(0, ": ".join((*names, part.reason)), "yellow"))
            lines += [IndentedLine(2, f"hint: {part.hint}")] if part.hint else []
        self.update_text("#told", make_wrapped_text(lines))

    def show_requests(self, row: ServerRow) -> None:
        hidden = [
            each.reason for each in row.gaps if each.part.startswith(("requests", row.target))
        ]
        none = f"not seen: {hidden[0]}" if hidden else "none in flight"
        listed = (
            row.target,
            none,
            *((each.id, *plain_screen.make_request_cells(each)) for each in row.requests),
        )
        if listed == self.shown_requests:
            return
        self.shown_requests = listed
        table: DataTable[Text] = self.get_main_widget("#in-flight", DataTable)
        at = table.cursor_row
        chosen = self.selected_request_id
        table.clear()
        for index, each in enumerate(row.requests[:MOST_REQUESTS]):
            style = "bold red" if each.stuck else ""
            table.add_row(
                *(make_plain_text(cell, style) for cell in plain_screen.make_request_cells(each)),
                key=str(index),
            )
            if each.id and each.id == chosen:
                at = index
        self.request_ids = [each.id for each in row.requests[:MOST_REQUESTS]]
        if not row.requests:
            table.add_row(make_plain_text(none, "dim"))
        if table.row_count:
            table.move_cursor(row=min(at, table.row_count - 1))

    request_ids: Sequence[str] = ()

    @property
    def selected_request_id(self) -> str:
        """The id of the chosen request by vLLM; empty without one."""
        at = self.get_main_widget("#in-flight", DataTable).cursor_row
        return self.request_ids[at] if 0 <= at < len(self.request_ids) else ""

    def show_log(self, follower: ServerFollower) -> None:
        """Show the lines of the log that hold the filter's text."""
        view = self.get_main_widget("#lines", RichLog)
        wanted = self.get_main_widget("#filter", Input).value.casefold()
        log, count = follower.log, follower.lines_read
        if self.shown_log[::2] != (follower.target, wanted):
            view.clear()
            added = log
            watched = follower.watched_server
            if watched and not watched.server.name:
                view.write(Text("vllmops did not start this server: it does not have its log"))
        else:
            added = log[len(log) - min(count - self.shown_log[1], len(log)) :]
        self.shown_log = follower.target, count, wanted
        for line in added:
            if wanted in line.casefold():
                view.write(Text(clean_log_text(line)))

    # -- keys --------------------------------------------------------------------------------

    def action_tab(self, name: str) -> None:
        self.get_main_widget(TabbedContent).active = name
        within = {"requests": "#in-flight", "log": "#lines"}
        self.get_main_widget(within.get(name, "#servers")).focus()
        self.show_selected()

    def action_filter(self) -> None:
        self.action_tab("log")
        self.get_main_widget("#filter").focus()

    def on_input_changed(self) -> None:
        self.show_selected()

    def on_input_submitted(self) -> None:
        self.get_main_widget("#lines").focus()

    def action_doctor(self) -> None:
        self.offer_command(key_bindings.make_doctor_command)

    def action_heal(self) -> None:
        self.offer_command(key_bindings.make_heal_command)

    def action_bundle(self) -> None:
        self.offer_command(key_bindings.make_bundle_command)

    def action_drain(self) -> None:
        self.offer_command(key_bindings.make_drain_command)

    def action_resume(self) -> None:
        self.offer_command(key_bindings.make_resume_command)

    def action_abort(self) -> None:
        if not (chosen := self.selected_request_id):
            self.show_warning("there is no request to end")
            return
        self.action_tab("requests")
        self.offer_command(lambda target: key_bindings.make_abort_command(target, chosen))

    def offer_command(self, make: Callable[[str], VllmopsCommand]) -> None:
        """Ask whether to run a command for the chosen server, and run it."""
        if self.selected_key is None:
            self.show_warning("there is no server")
            return
        try:
            action = make(self.selected_key[0])
        except (VllmopsError, OSError) as error:
            self.show_warning(str(error))
            return

        def run_if_confirmed(confirmed: bool | None) -> None:
            if confirmed:
                shown = Output(action)
                self.push_screen(shown)
                self.run_in_background(action, shown.show_output)

        self.push_screen(Confirm(action), run_if_confirmed)

    def action_stacks(self) -> None:
        """Take the stacks of the chosen process, or of the whole server."""
        self.action_tab("stacks")
        if self.selected_key is None:
            return
        target, _, pid = self.selected_key
        self.update_text("#frames", Text("reading the stacks"))

        def show_stacks(_: int, text: str) -> None:
            self.update_text(
                "#frames",
                Text(clean_log_text("\n".join(key_bindings.render_stacks(text, pid or None)))),
            )

        self.run_in_background(key_bindings.make_stacks_command(target), show_stacks)

    def run_in_background(
        self, action: VllmopsCommand, show_output: Callable[[int, str], None]
    ) -> None:
        """Run a command in a thread, and tell what it printed; quitting does not wait for it."""

        def run_and_show() -> None:
            code, text = key_bindings.run_command(action.arguments, 70)
            with suppress(Exception):  # the window, or the application, may be closed
                self.call_from_thread(show_output, code, text)

        threading.Thread(target=copy_context().run, args=(run_and_show,), daemon=True).start()

    def show_warning(self, text: str) -> None:
        self.notify(make_printable(text, lines=False), severity="warning", markup=False)


def compute_label_indent(node: TreeNode[Key]) -> int:
    """How many signs are before a row's label: one for each row above, one if it can be closed."""
    found = int(node.allow_expand)
    while node.parent and not node.parent.is_root:
        node, found = node.parent, found + 1
    return found


def make_tree_rows(servers: Iterable[ServerRow]) -> Iterable[tuple[Key, Text]]:
    """The tree: each row's key and label, those above first."""
    for row in servers:
        label = make_plain_text(f"{row.target}  ", "bold")
        label.append(
            make_printable(plain_screen.format_state(row), lines=False),
            plain_screen.STYLES[row.severity],
        )
        yield (row.target, "", 0), label
        several = len(row.nodes) > 1
        for node in row.nodes:
            if several and node.name:
                yield (row.target, node.name, 0), make_plain_text(node.name, "underline")
            for process in node.processes:
                yield (row.target, node.name, process.pid), make_process_label(process)


def make_process_label(process: ProcessRow) -> Text:
    """A process: which one, its processor time, and what it does."""
    label = make_plain_text(
        f"{format_role_and_ranks(process.role, process)} {process.pid} "
        f"{plain_screen.format_percent(process.cpu)} "
    )
    style = plain_screen.STYLES[process.severity] if process.severity else ""
    label.append(make_printable(plain_screen.describe_activity(process), lines=False), style)
    return label


def render_event(event: FindingEvent) -> Iterable[IndentedLine]:
    """A finding with its time; one that is over is one line."""
    began = time.strftime("%H:%M:%S", time.localtime(event.began))
    title, *rest = plain_screen.render_finding(event.finding)
    if event.ended_at is not None:
        ended = time.strftime("%H:%M:%S", time.localtime(event.ended_at))
        yield IndentedLine(0, f"{began} to {ended} {event.target}: {title.text.strip()}", "dim")
        return
    yield IndentedLine(0, f"{began} {event.target}: {title.text.strip()}", title.style)
    for line in rest:
        yield IndentedLine(2, line.text, line.style)


def make_sparkline_data(values: Sequence[float]) -> list[float]:
    """The last values, the newest on the right; a sparkline begins at its least: zero."""
    return [0.0, *([0.0] * SPARKS + list(values))[1 - SPARKS :]]


def format_number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"
