"""Secrets and prompts in every form in which they are met; what looks like them and is none."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllmops.redaction.redactor import MARK, TOLD, Redactor, find_launch_secrets

LOGS = Path(__file__).with_name("logs")
SERVER, OTHER = ((LOGS / name).read_text() for name in ("server.log", "other.log"))
STARTS = sorted((LOGS.parent.parent / "servers/logs").glob("*.log"))
HASH = "4dfb04f3173c1f2e" * 4


def test_the_log_of_a_server_that_logs_its_requests() -> None:
    """vLLM 0.32 at debug level, with keys, prompts and a token in a query."""
    assert SERVER.count("PLANTED") == 19
    redactor = Redactor()
    shown = redactor.redact_log(SERVER)
    assert "PLANTED" not in shown
    # The same as tokens, and the answers.
    assert "50, 46, 35" not in shown
    assert "' pic'" not in shown
    assert "' picture" not in shown
    assert redactor.counts["prompt or answer"] > 20
    before, after = SERVER.split("\n"), shown.split("\n")
    assert len(before) == len(after)
    # All else is as it was: what is no request is not touched, but for the key's own stars.
    changed = [line for line, now in zip(before, after, strict=True) if line != now]
    others = [line for line in changed if "PLANTED" not in line and "api_key" not in line]
    words = ("token_ids: [", "token_ids: (", "output: '", 'output: "', "JSON body", "Response: {")
    assert [x for x in others if not any(word in x for word in words)] == [
        line for line in before if "EngineZmqAddresses(inputs=" in line
    ]
    for kept in ("params: SamplingParams(n=1", "finish_reason: length", "version 0.32.0"):
        assert SERVER.count(kept) == shown.count(kept)


def test_every_other_form() -> None:
    shown = Redactor().redact_log(OTHER)
    for number, line in enumerate(shown.split("\n"), 1):
        assert "PLANTED" not in line, (number, line)
        assert "UExBTlRFR" not in line, (number, line)
        assert "0123456789abcdef0123" not in line.lower(), (number, line)
    for kept in (
        "'ssl_keyfile': '/etc/ssl/kept.key'",
        "'max_num_batched_tokens': 2048, 'tokenizer': 'kept-tokenizer'",
        "--max-num-seqs 16 --tokenizer kept-too",
        '&limit=5 HTTP/1.1" 200 OK',
        f"postgresql://{MARK}@db:5432/responses",
        '"kept": "yes"',
        "params: SamplingParams(n=1, max_tokens=16)",
        "kept, of another process",
        "kept, what comes after",
        "[type=missing, input_value=[redacted], input_type=dict]",
        'POST /v1/chat/completions HTTP/1.1" 200 OK',
        "Avg prompt throughput: 0.5 tokens/s",
        f"ghost key {HASH} in the cache, prompt_tokens: 12, max_tokens=16, eos_token='<|im_end|>'",
        f"mm_hash={HASH}",
    ):
        assert kept in shown, kept


def test_redaction_keeps_all_log_lines_of_the_server() -> None:
    for text in (SERVER, *(path.read_text() for path in STARTS)):
        redactor = Redactor()
        assert redactor.redact_server_log(text) == Redactor().redact_log(text)
        assert redactor.counts["log line of no known form"] == 0


@pytest.mark.parametrize("escape", ["\x1b", "\\u001b", "\\x1b", "\\\\u001b", "\\033", "^["])
def test_colours_hide_no_secret(escape: str) -> None:
    """As structlog and rich write them, and vLLM with VLLM_LOGGING_COLOR=1."""
    cyan, green, off = f"{escape}[36m", f"{escape}[1;32m", f"{escape}[0m"
    start = (
        f"{escape}[0;36m(EngineCore pid=8){escape}[0;0m {green}INFO{off} 11-26 00:00:00 [x.py:1] "
    )
    plain = "(EngineCore pid=8) INFO 11-26 00:00:00 [x.py:1] "
    for said, shown in {
        f"{cyan}api_key{off}={green}PLANTED{off}": f"api_key={MARK}",
        f"{{'{cyan}password{off}': {green}'PLANTED'{off}}}": f"{{'password': {MARK}}}",
        f"prompt: {green}'PLANTED PLANTED'{off}, n: {cyan}1{off}": f"prompt: {MARK}, n: 1",
        f"{green}loaded{off} 3 weights": "loaded 3 weights",
    }.items():
        assert Redactor().redact_server_log(start + said) == plain + shown


def test_redaction_keeps_ssh_destinations() -> None:
    for line in (
        "ssh -i ~/.ssh/key ops@gpu-7 vllmops status",
        "ssh -p 2222 -i ~/.ssh/api_key -o BatchMode=yes ops@10.0.0.7",
        'ssh -i "/home/ops/my key" ubuntu@ec2-1-2-3-4.compute.internal',
        "what: `ssh -i /run/secrets/token ops@gpu-7`".replace("`", '"'),
    ):
        assert Redactor().redact_text(f"{line}\n{line}") == f"{line}\n{line}"
    for line in (
        "ssh -i key ops@gpu-7 API_KEY=PLANTED99 vllm serve",
        "sshpass -p planted@gpu-9 ssh -i key ops@gpu-7",
        "ssh -i key ops@gpu-7; echo the password is planted@gpu-9",
        "with key planted@gpu-9",
    ):
        assert "planted" not in Redactor().redact_text(line).lower()


def test_redaction_hides_log_lines_of_unknown_form() -> None:
    lines = {
        "the user asked: PLANTED": MARK,
        "(APIServer pid=7) said PLANTED": f"(APIServer pid=7) {MARK}",
        "INFO:myapp.chat:PLANTED": f"INFO:{MARK}",
        "INFO:     chat with PLANTED": f"INFO:     {MARK}",
        "2026-11-20 19:05:17,123 - ERROR - PLANTED": f"2026-11-20 19:05:17,123 - ERROR - {MARK}",
        "2026-11-20T19:05:17Z [INFO] app: PLANTED": f"2026-11-20T19:05:17Z [INFO] {MARK}",
        '{"level": "info", "logger": "app", "message": "PLANTED"}': MARK,
        "  PLANTED, the second line of it": MARK,
        "Answer: PLANTED": MARK,
    }
    redactor = Redactor()
    assert redactor.redact_server_log("\n".join(lines)).split("\n") == list(lines.values())
    assert redactor.counts["log line of no known form"] == len(lines)


def test_lines_of_known_forms() -> None:
    for line in (
        'INFO:     10.0.0.7:5000 - "POST /v1/responses HTTP/1.1" 200 OK',
        'INFO:     [::1]:5000 - "GET /health HTTP/1.1" 200 OK',
        "ERROR:    Exception in ASGI application",
        "2026-11-20 19:05:17,123 INFO vllm.v1.engine.async_llm: Added request r",
        '{"asctime": "2026-11-20", "name": "vllm.engine", "message": "Added request r"}',
        "[rank0]:[W1120 19:05:23.123456789 ProcessGroupNCCL.cpp:1538] Warning: x",
        "node1:10:11 [0] NCCL INFO Bootstrap: Using eth0",
        "/venv/lib/x.py:12: UserWarning: resource_tracker: leaked",
        "(Watch pid=9) WARNING 11-20 19:05:17 [watch] demo has stalled",
        "Fatal Python error: Segmentation fault",
        "Thread 0x00007f1 (most recent call first):",
        '  File "/venv/vllm/x.py", line 12 in spin',
        "Loading safetensors checkpoint shards: 100% Completed | 1/1 [00:00<00:00, 55.40it/s]",
    ):
        assert Redactor().redact_server_log(line) == line


def test_a_traceback_is_kept_to_its_end_and_no_further() -> None:
    known = (
        "(EngineCore pid=8) Traceback (most recent call last):\n"
        '(EngineCore pid=8)   File "/srv/app.py", line 3, in reply\n'
        "(EngineCore pid=8)     answer(user)\n"
        "(EngineCore pid=8)     ^^^^^^^^^^^^\n"
        "(EngineCore pid=8) torch.OutOfMemoryError: CUDA out of memory"
    )
    shown = Redactor().redact_server_log(
        f"{known}\n(EngineCore pid=8) PLANTED\n(EngineCore pid=8)   PLANTED"
    )
    assert shown == f"{known}\n(EngineCore pid=8) {MARK}\n(EngineCore pid=8) {MARK}"
    # Of another process, in the midst of it.
    mixed = known.replace("\n", "\nAnswer: PLANTED\n", 1)
    assert Redactor().redact_server_log(mixed) == known.replace("\n", f"\n{MARK}\n", 1)


def test_redacting_twice_changes_nothing() -> None:
    for way in (Redactor.redact_log, Redactor.redact_server_log):
        once = way(Redactor(), SERVER + OTHER)
        assert way(Redactor(), once) == once


def test_it_is_quick_whatever_the_text() -> None:
    """Lines that make careless patterns slow; a second here is an hour for a real log."""
    size = 50_000
    for text in (
        "A_" * size,
        "api" * size,
        "a" * size + "=",
        "://" * size,
        "secret" * size,
        "secret-" * size,
        "prompt: [" * (size // 10),
        "key=(" * (size // 10),
        "'" * size,
        '"content": "' + "\\" * size,
        "eyJ" * size,
        "vllm:1:" * size,
        "-----BEGIN PRIVATE KEY-----" * (size // 30),
        "data:image/png;base64," * (size // 20),
        "name: key {" * (size // 15),
        "a@b1234-9 no key. " * (size // 15),
        "password " + " " * size,
        "GET /?password" + "%20" * size,
        "\n" * size,
    ):
        began = time.thread_time()
        Redactor(["planted-secret"]).redact_server_log(text)
        assert time.thread_time() - began < 5, text[:20]


# Text that nothing else contains; what is between may be anything that fits into a place.
def planted_texts(alphabet: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    return st.text(alphabet, max_size=40).map(lambda text: f"Qx7{text}7xQ")


def absent(shown: str) -> None:
    assert "Qx7" not in shown
    assert "7xQ" not in shown


anything = planted_texts(st.characters(exclude_categories=["Cs"]))
printable = planted_texts(st.characters(min_codepoint=33, max_codepoint=126))
word = planted_texts(st.sampled_from("abcXYZ0189-_~+/="))


@given(anything)
def test_prompts_and_answers_as_vllm_logs_them(prompt: str) -> None:
    head = "(APIServer pid=7) DEBUG 11-20 19:05:17 [logger.py:41] "
    whole = f"{head}Input prompt: {prompt}\nplain: kept".replace("\r", "").replace(
        "\n", f"\r\n{head}"
    )
    for line in (
        f"{head}Request r details: prompt: {prompt!r}, prompt_token_ids: [1], prompt_embeds",
        f"{head}Received request r: prompt: {prompt!r}, params: SamplingParams(n=1)",
        f"{head}Request r JSON body: {json.dumps({'prompt': prompt})}",
        f"{head}Request r JSON body: {json.dumps({'prompt': prompt})[:-3]}",
        f"{head}Generated response r: output: {prompt!r}, finish_reason: length",
        f"{head}response_body={{{json.dumps({'choices': [{'text': prompt}]})}}}",
        f"{head}input_value={ {'messages': [{'content': prompt}]}!r}, input_type=dict",
        f"{head}Received messages request {json.dumps({'system': prompt}, ensure_ascii=False)}",
        f"ChatCompletionRequest(messages={[{'content': prompt}]!r}, model='m')",
        json.dumps({"input": [{"content": [{"type": "input_text", "text": prompt}]}]}, indent=2),
        whole,
    ):
        absent(Redactor().redact_log(line))


def test_a_prompt_that_begins_like_a_call() -> None:
    for prompt in ("f()PLANTED", "main() PLANTED", "x = PLANTED", "print(1) # PLANTED"):
        shown = Redactor().redact_log(
            f"(APIServer pid=7) DEBUG 11-20 19:05:17 [c.py:1] Input prompt: {prompt}"
        )
        assert shown.endswith("Input prompt: [redacted]")


@given(word)
def test_tokens_by_their_place(token: str) -> None:
    for line in (
        f"Authorization: Bearer {token}",
        f"{{'authorization': 'Bearer {token}', 'x': 1}}",
        f"[(b'x-api-key', b'{token}')]",
        f"GET /v1/models?api_key={quote(token, safe='')}&x=1",
        f"--api-key {token}",
        f"--hf-token={token} --port 8000",
        f"MY_SECRET={token}",
        f"'api_key': ['other', '{token}'], 'x': 1",
        f'{{"client_secret": "{token}"}}',
        f"password: {token}",
        f"redis://user:{token}@host:6379/0",
        f"sk-proj-{re.sub('[^A-Za-z0-9_-]', '', token)}",
        f"hf_0123456789{re.sub('[^A-Za-z0-9]', '', token)}",
        f"signing key: '{'0a' * 32}'",
    ):
        shown = Redactor().redact_text(line)
        absent(shown)
        assert "0a0a" not in shown


@given(printable)
def test_known_secrets_are_redacted_in_every_encoding(secret: str) -> None:
    known = list(find_launch_secrets({"VLLM_API_KEY": secret}, ()))
    for line in (
        secret,
        f"a{secret}b",
        json.dumps({"x": secret}),
        repr({"x": secret}),
        f"/path?x={quote(secret, safe='')}",
        f"nested {json.dumps(json.dumps(secret))}",
    ):
        absent(Redactor(known).redact_text(line))


@given(printable, printable)
def test_command_lines(first: str, second: str) -> None:
    words = ["vllm", "serve", "m", "--api-key", first, second, "--port", "8000"]
    known = list(find_launch_secrets({}, words))
    assert {first, second} <= set(known)
    assert Redactor().redact_command_line(words) == [*words[:4], MARK, MARK, "--port", "8000"]
    assert Redactor().redact_command_line(["x", f"--hf-token={first}"]) == [
        "x",
        f"--hf-token={MARK}",
    ]


@pytest.mark.parametrize(
    ("words", "secret"),
    [
        (["sshpass", "-p", "swordfish", "ssh", "h"], "swordfish"),
        (["mysql", "-h", "h", "-pswordfish", "db"], "swordfish"),
        (["redis-cli", "-a", "sword fish", "ping"], "sword"),
        (["curl", "--user=bob:swordfish", "http://h"], "swordfish"),
        (["docker", "login", "-u", "bob", "-p", "amber-horse-orbit", "h"], "amber"),
        (["vault", "login", "-address=https://h:8200", "swordfish7swordfish"], "swordfish7"),
        (["serve", "--tls-key", "-----BEGIN EC PRIVATE KEY-----\nMHcCAQEEIB\n-----END"], "MHcC"),
        (["$env:DB_PASSWORD", "=", "swordfish;"], "swordfish"),
    ],
)
def test_a_word_that_is_secret_by_those_before_it(words: list[str], secret: str) -> None:
    shown = Redactor().redact_command_line(words)
    assert len(shown) == len(words)
    assert secret not in " ".join(shown)
    assert shown[0] == words[0]


def test_words_that_are_no_secrets() -> None:
    words = ["vllm", "serve", "m", "--tokenizer", "t", "--max-num-batched-tokens", "2048"]
    words += ["--ssl-keyfile", "/etc/key.pem", "--served-model-name", "a", "b"]
    assert Redactor().redact_command_line(words) == words
    assert list(find_launch_secrets({}, words)) == []


def test_environment() -> None:
    kept = {
        "VLLM_LOGGING_LEVEL": "DEBUG",
        "CUDA_VISIBLE_DEVICES": "0,1",
        "PATH": "/usr/bin:/bin",
        "VLLM_MAX_TOKENS_PER_EXPERT_FP4_MOE": "163840",
        "VLLM_RPC_TIMEOUT": "10000",
        "PYTHONPATH": "/opt/x",
    }
    hidden = {
        "HOME": "/home/op",
        "VLLM_API_KEY": "k",
        "VLLM_RESPONSES_STATE_SIGNING_KEY": "0a" * 32,
        "HF_TOKEN": "hf_x",
        "AWS_SECRET_ACCESS_KEY": "x",
        "ANYTHING": "x",
        "VLLM_ODD": "abc123def456abc123def456",
    }
    shown = Redactor().redact_environment({**kept, **hidden})
    assert {name: shown[name] for name in kept} == kept
    assert {shown[name] for name in hidden} == {MARK}
    url = {"VLLM_RESPONSES_STORE": "postgresql://u:secret@db/x"}
    assert Redactor().redact_environment(url) == {
        "VLLM_RESPONSES_STORE": f"postgresql://{MARK}@db/x"
    }
    assert set(find_launch_secrets({**kept, **hidden, **url}, ())) == {
        *("k", "0a" * 32, "hf_x", "x", "secret"),
    }


def test_collect_env_prints_the_environment_too() -> None:
    text = "OS : Linux\n[pip3] torch==2.13.0\nVLLM_X=1\nNO_COLOR=x\nVLLM_API_KEY=abc\n"
    shown = (
        "OS : Linux\n[pip3] torch==2.13.0\nVLLM_X=1\nNO_COLOR=[redacted]\nVLLM_API_KEY=[redacted]\n"
    )
    assert Redactor().redact_assignments(text) == shown
    key = "KEY=-----BEGIN PRIVATE KEY-----\nabcdefghijklmnop\n-----END PRIVATE KEY-----"
    assert "abcdefghijklmnop" not in Redactor().redact_assignments(f"A=1\0{key}\0B=2")
    secret = "Qx7=7xQ"
    assert Redactor([secret]).redact_assignments(f"VLLM_X=1\n{secret}\n") == f"VLLM_X=1\n{MARK}\n"


def test_a_secret_of_several_lines() -> None:
    key = (
        "-----BEGIN PRIVATE KEY-----\nabcdefghijklmnop\nqrstuvwxyz012345\n-----END PRIVATE KEY-----"
    )
    redactor = Redactor(find_launch_secrets({"TLS_KEY": key}, ()))
    for line in ("abcdefghijklmnop", "x qrstuvwxyz012345 y", json.dumps({"a": key})):
        shown = redactor.redact_text(line)
        assert "abcdef" not in shown
        assert "qrstuv" not in shown


@pytest.mark.parametrize("value", ["", "None", "null", "true", "[]", "''"])
def test_empty_values_are_not_redacted(value: str) -> None:
    assert Redactor().redact_text(f"api_key={value}, x") == f"api_key={value}, x"


TABLES = {
    "commas": ["name,password,role", "bob,{},admin", "ann,{},user"],
    "quotes": ['"host","client_secret"', '"h, i","{}"'],
    "semicolons": ["user;api_key;created", "ann;{};2026-01-01"],
    "tabulators": ["id\ttoken\texpires", "1\t{}\t3600"],
    "a comment": ["# id | private_key | n", "1 | {} | 2"],
    "Markdown": ["| user | password |", "|------|----------|", "| bob  | {} |"],
    "a database": [
        " login | password | n ",
        "-------+----------+---",
        " bob   | {} | 5",
        "(1 row)",
    ],
    "spaces": ["NAME      ACCESS TOKEN      AGE", "ci-bot    {}      5d"],
}
VALUES = ["swordfish", "4dfb04f3173c1f2e4dfb04f3173c1f2e", "4dfb04f3-173c-1f2e-4dfb-04f3173c1f2e"]


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("value", VALUES)
def test_the_columns_of_tables(name: str, value: str) -> None:
    _, *rows = [row.format(value) for row in TABLES[name]]
    _, *shown = Redactor().redact_text("\n".join([TABLES[name][0], *rows])).split("\n")
    if name != "tabulators" or value != "swordfish":  # a model's tokens are words, too
        rows = [row.replace(f'"{value}"', value).replace(value, MARK) for row in rows]
    assert shown == rows


@pytest.mark.parametrize(
    "text",
    [
        "id\ttoken\tlogprob\n12\thello\t-0.25\n13\tworld42\t-1.5",
        "key,count\nprefix_cache_hits,120",
        "NAME    READY   AGE\nvllm-0  1/1     5d",
        "name,password,role\nthe end of the table\na,bcdefg7h,c",
        "cache_key,hits\n4dfb04f3173c1f2e4dfb04f3173c1f2e,5",
        "NAME  VALUE\nmax_tokens  4096\nmodel  meta-llama/Llama-3.1-8B",
        "Key  Value\n---  -----\nblock_hash  9f86d081884c7d659a2feaa0c55ad015",
        '- name: max-model-len\n  value: "8192"\n- name: tokenizer-mode\n  value: auto',
        "    offload_key: OffloadKey,\n    value: torch.Tensor,",
        "    hf_token,\n    **kwargs,",
        "NAME  TYPE  DATA  AGE\nvllm-api-keys  Opaque  1  12d",
        "tokens:\n  - <s>\n  - </s>\n",
    ],
)
def test_tables_without_secrets(text: str) -> None:
    assert Redactor().redact_text(text) == text


# What a person typed, and what a program made; the name is in another line, or far from it.
@pytest.mark.parametrize("value", ["hunter4521", "a8Dk2mXz91QwErTy", "amber-horse-orbit-maple"])
@pytest.mark.parametrize(
    "text",
    [
        "In [3]: settings.api_token\nOut[3]: '{}'",
        ">>> cfg.db_password\n'{}'",
        "(Pdb) p self.secret_key\n'{}'",
        '(gdb) p cfg->password\n$3 = 0x55d2 "{}"',
        '$1 = {{host = 0x55 "h", db_password = 0x7f3 "{}", n = 3}}',
        "KeyError: '{}'\nThe above happened in tokens['api_token']",
        "assert '{0}' == 'x'\n +  where '{0}' = Settings().api_key",
        "login with '{0}'\napi_key={0}\nretried with {0} again",
        '"store_api_key": {{\n  "value": "{}",\n  "type": "string"\n}}',
        "cannot decode dbpass '{}': Incorrect padding",
        'API_TOKENs = ["{}"]',
        'gateway_passwords = ["{}"]',
    ],
)
def test_a_secret_whose_name_is_elsewhere(text: str, value: str) -> None:
    assert value not in Redactor().redact_text(text.format(value))


@pytest.mark.parametrize("word", ["A" * 200 + "-", "aA1" * 60 + "-", "Ab-" * 60, "a1" * 100 + "/"])
def test_there_is_one_way_to_read_a_word(word: str) -> None:
    """An expression with several takes longer than anybody waits."""
    assert Redactor().redact_text(f"password\n{word}\n").count("\n") == 2


def test_a_document_without_an_end_does_not_hide_all_that_follows() -> None:
    lines = ["cat > /run/secrets/db << EOT", "swordfish", *["plain text"] * 1000]
    shown = Redactor().redact_text("\n".join(lines)).split("\n")
    assert shown[1] == MARK
    assert shown[-1] == "plain text"


def test_redactor_remembers_a_bounded_number_of_secrets() -> None:
    values = [f"a8Dk2mXz91QwErT{n}" for n in range(1000)]
    redactor = Redactor()
    redactor.redact_text("\n".join(f"password={value}" for value in values))
    assert list(redactor.remembered_secrets) == values[-TOLD:]


@pytest.mark.parametrize(
    ("line", "secret"),
    [
        ("http h/login user==bob password==swordfish", "swordfish"),
        ("loaded token from /x/y: 4dfb04f3173c1f2e4dfb04f3173c1f2e", HASH[:32]),
        ("token=4dfb04f3-173c-1f2e-4dfb-04f3173c1f2e", "4dfb04f3"),
        ("tok=4dfb04f3173c1f2e4dfb04f3173c1f2e", HASH[:32]),
        ('{"primaryKey": "4dfb04f3173c1f2e4dfb04f3173c1f2e"}', HASH[:32]),
        ('{"accessKeySecret": "swordfish"}', "swordfish"),
        ("npm config set //registry.npmjs.org/:_authToken swordfish7", "swordfish7"),
        ("gcloud config set auth/client_secret swordfish7", "swordfish7"),
        ("wrangler secret put API_TOKEN <<< swordfish7", "swordfish7"),
        ('{"loc":["body","apiKey"],"msg":"too short","input":"amber-horse-orbit"}', "amber-horse"),
        (
            "[{'loc': ('body', 'db_password'), 'msg': 'too long', 'input': 'amber-horse-orbit'}]",
            "amber-horse",
        ),
        ("DEBUG: ConfigParser: app_password->C0ffee1", "C0ffee1"),
        ("     -> gateway.app.password: Str(Kite7x)", "Kite7x"),
        ("the write key is 4dfb04f3173c1f2e4dfb04f3173c1f2e from now on", HASH[:32]),
        ("Using gh pat (L3tM31n42) from the environment", "L3tM31n42"),
        ("cluster token mismatch: expected 'Kite7x', got 'x'", "Kite7x"),
        ("sudo pass from 10.0.0.3: o48uurtjpxw2", "o48uurtjpxw2"),
        (
            "gateway: error: argument --api-key: invalid check value: 'amber-horse-orbit'",
            "amber-horse",
        ),
        # Signs, as many as there are programs.
        ("proxy password ........... swordfish", "swordfish"),
        ('a:1:{s:10:"api_secret";s:9:"swordfish";}', "swordfish"),
        ('if request.headers["X-Api-Key"] != "swordfish": raise', "swordfish"),
        ("<smtpPassword><![CDATA[sword&fish]]></smtpPassword>", "sword&fish"),
        (r"cache.url=redis\://\:swordfish\@cache\:6379/0", "swordfish"),
        (r'{"url": "amqp:\/\/bob:swordfish@mq\/jobs"}', "swordfish"),
        ("login: password=<sword'fish> for <bob>", "fish"),
        ("Password:X9Y8(ABC) TLS:false", "Y8(ABC"),
        ("run\0--db-password\0swordfish with a fin\0--port\08000\0", "swordfish"),
        ("INSERT INTO users (id, password) VALUES (1, 'sword<fish>'), (2, 'kraken');", "fish"),
        ("INSERT INTO users (id, password) VALUES (1, 'sword<fish>'), (2, 'kraken');", "kraken"),
        # Sentences.
        ("Password for the admin user (db.local): Sw:or]d;9", "Sw:or"),
        ("Password for 'https://bob@git.local': lantern velvet mammoth piano", "lantern"),
        ("# the former redis password, no longer used: AmberOrbit51", "AmberOrbit51"),
        ("The password was set to `swordfish`; the error is the same", "swordfish"),
        ("I changed the ftp password from the default to Kx7_mm/9 and so on", "Kx7_mm"),
        ("Your new password is <b>amber-horse-orbit</b>", "amber-horse"),
        ("my pw is amber-horse-orbit, by the way", "amber-horse"),
        ("try 'swordfish' as the database password", "swordfish"),
        ("log in with bob / swordfish at the console", "swordfish"),
        ("Passwort für bob: Kx7]mm9", "Kx7]mm9"),
        ("clé d'API : swordfish", "swordfish"),
        ("2026-01-01 [app] токен: 4dfb04f3173c1f2e4dfb04f3173c1f2e", HASH[:32]),
        ("Enter your token (it is not shown): swordfish", "swordfish"),
        ("started it with the kaggle key `4dfb04f3173c1f2e4dfb04f3173c1f2e`", HASH[:32]),
        ('NATS_NKEY_SEED="ABCDEFGHIJKLMNOPQRSTUVWXYZ"', "ABCDEFGH"),
        ("it connects with SU" + "ABCDEFG2" * 7 + " to the bus", "ABCDEFG2"),
        ("the deploy token is:\n    Kx7mmnQp\n    Zz81vvBcd\n(it wraps)", "Zz81vvBcd"),
        ('write(3, "AUTH amber-horse-orbit\\r\\n", 24) = 24', "amber-horse"),
        # Files and commands.
        ("printf 'swordfish' | tee /run/secrets/db > /dev/null", "swordfish"),
        ("cat > /run/secrets/db <<'EOT'\nswordfish\nEOT", "swordfish"),
        ('1) "requirepass"\n2) "swordfish"', "swordfish"),
        ("S: 334 UGFzc3dvcmQ6\nC: c3dvcmRmaXNo", "c3dvcmRmaXNo"),
        ("<ann> what's the root password?\n<bob> Kx7;mm", "Kx7;mm"),
        ('"bob" "Kx7;mmn"\n; plain passwords', "Kx7;mmn"),
        (
            "    connect(host, password)\n    │       │     └ 'swordfish'\n    │       └ 'h'",
            "swordfish",
        ),
        (
            "  --key-passphrase TEXT\n      of the key (default: lantern velvet mammoth piano)",
            "lantern",
        ),
    ],
)
def test_named_secrets_are_redacted(line: str, secret: str) -> None:
    assert secret not in Redactor().redact_text(line)


@pytest.mark.parametrize(
    "line",
    [
        "PyJWT==2.10.1 google-cloud-secret-manager==2.20.0",
        "if token == eos_token_id: break",
        "Sampled token 42, request id 4dfb04f3173c1f2e4dfb04f3173c1f2e",
        "prefix token block hash 4dfb04f3173c1f2e4dfb04f3173c1f2e found",
        "primary key column is 'uuid'",
        "docker compose -p vllm up",
        "session_id: 4dfb04f3-173c-1f2e-4dfb-04f3173c1f2e",
        "    ssh_private_key: /path/to/your/key.pem",
        "session: session_params.Session, token: models.Token",
        '"AsyncTokenService": (".admin_api_keys", "AsyncTokenService"),',
        "kind: SecuritySchemeType = Field(default=SecuritySchemeType.apiKey)",
        "secret = client.V1Secret(",
        '  "io.k8s.api.core.v1.SecretProjection": {',
        '  "serviceAccountToken": {',
        "| ssl_cert_key | The path to the private key of the client certificate |",
        "if (token->next && key->len > 3) secret->data = 0;",
        "vllm: error: argument --api-key: expected at least one argument",
        '{"loc":["body","max_tokens"],"msg":"not an integer","input":"many-of-them"}',
        # Where a secret comes from, or what stands for one.
        "export HF_TOKEN=$(cat /run/secrets/hf)",
        "export API_KEY=${API_KEY:?is not set}",
        'curl -H "Authorization: Bearer $API_KEY" h',
        "Authorization: Bearer [REDACTED]",
        '  password: "{{ vault_password }}"',
        "  password: {{ .Values.db.password | quote }}",
        "  password = (sensitive value)",
        "OPENAI_API_KEY=EMPTY",
        "  --api-key API_KEY     the server wants it",
        "  --hf-token [HF_TOKEN]",
        "docker login --username bob --password-stdin registry.local",
        "KUBECONFIG=/home/bob/.kube/config",
        'password = getpass.getpass("Password: ")',
        # The names of secrets.
        'Error: secret "db-credentials" not found',
        'msg="rotated" secret="prod/db-secrets" n=1',
        "  imagePullSecrets: [{name: registry-key}]",
        "    Type:  Secret (a volume populated by a Secret)",
        "CREATE TABLE api_keys (id uuid PRIMARY KEY, n int)",
        "The secret `HF_TOKEN` does not exist",
        "INFO app.credentials: Found them in a file",
        # Keys of caches, public ones, checksums.
        "Cache the graph for later use, key 4dfb04f317",
        "cache hit; key=vllm@org/model@1@0@4dfb04f3173c1f2e",
        "gpg: key 4DFB04F3173C1F2E: public key imported",
        "Server host key: ssh-ed25519 SHA256:s09H4qBy0SEVVX2RixDDOakq5neY9O3UHorDzwEaVdJ",
        "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAI9JdNThuSJI46AndPCH1Y3ocxDgdw6hbeLU3RQffswov bob@h",
        '"integrity": "sha512-me3YOo0UjIYhSztg2f6Qhfmn+a7Gd4sPdBIZQbbTrMBs0Ulow3KmGdumAW2aGy2=="',
        "https://ops@git.local/x.git",
        "cookie_samesite = lax",
        "password_encryption = scram-sha-256",
        "token_type=Bearer expires_in=3600",
        "    topologyKey: kubernetes.io/hostname",
        "mask = 1 << key\nnext = 2",
        'if input_key == "input_features": pass',
        "Pass `image_mode=None` to keep it",
    ],
)
def test_text_that_resembles_a_secret_is_kept(line: str) -> None:
    assert Redactor().redact_text(line) == line


@pytest.mark.parametrize(
    "text",
    [
        "MYSQL_ROOT_PASSWORD=quiet(river)9",
        "db.password=quiet[river]9",
        "secureJsonData:\n    httpHeaderValue2: {}",
        "**Login:** root\n**Password:** {}",
        "sshpass -p a:{}:b ssh ops@10.0.0.1",
        "echo '{} x' | kinit ops@EXAMPLE.ORG",
        "pagerduty_configs:\n  - routing_key: 5f0c1d2e3b4a59687786950413223140",
    ],
)
def test_secrets_with_brackets_quotes_or_colons_are_redacted(text: str) -> None:
    value = "quiet$river9"
    shown = Redactor().redact_text(text.format(value) if "{}" in text else text)
    assert not [word for word in (value, "river", "5f0c1d2e3b4a") if word in shown], shown


def test_a_call_and_an_index_are_no_password() -> None:
    for line in ("password = ask(prompt)", "password = values[name]", "routing_key=tasks.gpu"):
        assert Redactor().redact_text(line) == line
