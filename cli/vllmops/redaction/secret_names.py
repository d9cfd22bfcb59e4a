"""Which names stand before secrets: of variables, options, fields, headers, and in sentences.

A name is judged by its words, however they are joined: ``DB_PASS``, ``dbPass``, ``db-pass``.
"""

from __future__ import annotations

import functools
import re
from enum import IntEnum

# Each name of a secret has one of these.
STEMS = (
    *("key", "tok", "secret", "pass", "pwd", "cred", "auth", "cookie", "bearer", "dsn", "sig"),
    *("pat", "jwt", "salt", "otp", "sas", "hook", "conn", "sess", "x-amz", "dockerc", "kubec"),
    *("pin", "pw", "community", "otlp", "otel", "code", "psk", "phrase", "honeycomb", "input_v"),
    *("kennwort", "schlüssel", "mdp", "contrase", "clave", "senha", "chave", "wachtw", "hasł"),
    *("haslo", "hesl", "lösen", "adgang", "salas", "jelsz", "парол", "ключ", "密", "口令"),
    *("パスワード", "비밀", "mot de passe", "login", "logon"),
    *(
        "токен",
        "clé",
        "clef",
        "jeton",
        "令牌",
        "トークン",
        "토큰",
        "parol",
        "şifre",
        "chiave",
        "seed",
    ),
    *("sign-in", "signin", "oidc", "sso", "saml", "sasl", "ldap", "grant", "refresh", "vault"),
)
# What a password or a key is called in other languages.
FOREIGN = re.compile(
    r"passwort|kennwort|schlüssel|\bmdp\b|passe\b|contraseña|contrasena|\bclave\b|secreta|\bsenha\b"
    r"|\bchave\b|wachtwoord|\bhas[lł]o\b|\bheslo\b|lösenord|adgangskode|passord|salasana|jelszó"
    r"|\bparola?\b|\bşifre|\bchiave\b|\bcl(?:é|ef)\b|\bjeton\b|\bтокен\b|令牌|トークン|토큰"  # noqa: RUF001
    r"|парол|\bключ|密码|密碼|口令|密钥|パスワード|비밀번호"
)
SOURCE = re.compile(
    r"\.(?:py|pyx|cc?|cpp|cu|cuh|h|hpp|go|rs|js|ts|java)$"
)  # a file, a line behind it
WORD = re.compile(r"[A-Z]{2,}s(?![a-z])|[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[A-Z]+|\d+")


class Secrecy(IntEnum):
    """What a name says of its value."""

    NONE = 0
    MAYBE = 1  # a secret if the value looks like one, and not like a hash
    LIKELY = 2  # a secret if the value looks like one
    SECRET = 3


def make_word_set(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Whatever else is in the name.
STRONG = make_word_set(
    "password passwords passwd passphrase passcode secret secrets credential credentials creds "
    "cred apikey apikeys bearer authorization htpasswd dockerconfigjson dockercfg kubeconfig "
    "authtoken "
    "accesstoken accesskey secretkey privatekey webhook webhooks cookie cookies jwt pwd pw psk"
)
ENDINGS = (
    *("password", "passwd", "passphrase", "secret", "apikey", "apitoken", "authtoken", "sessid"),
    *(
        "accesstoken",
        "identitytoken",
        "refreshtoken",
        "secretkey",
        "accesskey",
        "privatekey",
        "sessionid",
        "dsn",
        "pw",
    ),
)
# A name with such an ending describes a secret, and is none.
ABOUT = make_word_set(
    "file files path dir directory folder name names length len count min max ttl expiry expires "
    "expiration type types kind policy required enabled disabled manager provider source version "
    "size field prompt class status error errors ref arn algorithm mode method location hint age "
    "authentication validator validation middleware handler headers store backend format scheme "
    "index rotation rotated rules rule keyref mount engine url uri urls env var variable set "
    "timeout retries failed failures requests created updated at by for is has domain parameters"
    " stdin samesite encryption"
)
# Before "key": keys of mappings, caches and tables.
OTHER_KEYS = make_word_set(
    "cache sort foreign partition group block mm hash dict lru kv ghost map unique index "
    "row column public pub lookup registry state_dict weight param parameter config query "
    "attention stale missing unexpected unknown duplicate object object json metric metrics "
    "label request "
    "routing item entry feature sorted composite compile graph shape bucket kernel head "
    "value num n k arrow down up enter page answer image audio video modality tuple string prefix "
    "per hashed idempotency evict evicted eviction lora adapter prompt stats tensor layer tree "
    "node quant activation arg first last topology gpg pgp"
)
OTHER_KEY_WORDS = make_word_set(
    "monkey turkey hotkey donkey jockey hockey whiskey pubkey publickey cachekey sortkey hashkey"
)
# Before "token": those of models.
OTHER_TOKENS = make_word_set(
    "eos bos pad unk mask sep cls stop special image img audio video vision think thinking start "
    "end begin next last first num max min total prompt input output sampled sample "
    "draft target bonus accepted rejected placeholder tool call boi eoi eot eom eog chunk per fim "
    "prefix suffix middle text single cached reasoning completion speech decoder encoder padding "
    "mm multimodal patch newline separator unexpected every each one two any "
    "same vocab added continuation sot transcribe timestamp nl channel role turn ubatch by "
    "retrieved computed word embed"
)
# Before "tokens": those that give rights.
RIGHTS = make_word_set(
    "api access auth refresh bearer admin session secret hf hub github gitlab service account id "
    "bot csrf xsrf oauth oauth2 security registry personal deploy vault"
)
# Before "key", those that do.
RIGHTS_OF_KEYS = RIGHTS | make_word_set(
    "private signing encryption master shared storage sas license client hmac ssh rsa subscription "
    "apikey openai anthropic deploy host function developer root user your my recovery "
    "unseal serial fernet tacacs radius write ingest ingestion app kaggle datadog newrelic wandb"
    " grafana splunk sendgrid mailgun twilio stripe cohere mistral groq replicate runpod langfuse"
    " langsmith tavily pinecone qdrant cloudflare deepgram elevenlabs pagerduty opsgenie"
)
# What names end with that are secrets, though their last word says nothing alone.
PAIRS = frozenset(
    {
        *(("connection", "string"), ("conn", "str"), ("community", "string"), ("webhook", "url")),
        *(("webhook", "uri"), ("hook", "url"), ("hook", "uri"), ("otlp", "headers")),
        *(("otel", "headers"), ("mfa", "code"), ("otp", "code"), ("auth", "code")),
        *(("recovery", "code"), ("backup", "code"), ("seed", "phrase"), ("honeycomb", "team")),
        *(
            ("nkey", "seed"),
            ("totp", "seed"),
            ("wallet", "seed"),
            ("key", "seed"),
            ("secret", "seed"),
        ),
        *(("verification", "code"), ("time", "code"), ("pass", "phrase"), ("wifi", "pass")),
        *(
            ("secret", "id"),
            ("key", "material"),
            ("input", "value"),
        ),  # what a validator was given, whatever its name
    }
)
GIVE_PATS = make_word_set("gh github gitlab bitbucket azure ado personal")  # personal access tokens
OTHER_PINS = make_word_set("cpu core thread gpu gpio version memory mem process numa")
GIVEN = make_word_set(
    "allowed accepted valid known user users client static"
)  # keys and tokens that are
OTHER_PASSES = make_word_set(
    "forward backward fwd bwd first second third single multi one two prefill decode compile "
    "fusion inductor grad post pre custom warmup warm profile profiling dummy model optimization "
    "graph draft the this each every next last by did tests test reshape noop sequence joint"
)
PASS_WORDS = make_word_set("bypass compass encompass surpass trespass overpass")
AFTER = make_word_set(
    "value val plain plaintext raw base64 b64 hex str string data old new prev previous current "
    "prod production staging dev test live main primary secondary header env material"
)


def classify_words(name: str, preceding_words: str) -> Secrecy:
    """What a name of at most a hundred characters says, after ``preceding_words``."""
    found = [word.lower() for word in WORD.findall(name)]
    earlier = preceding_words.lower().replace("-", " ").split()
    if found[-2:] in (["pull", "secrets"], ["pull", "secret"]):  # of Kubernetes, which has names
        return Secrecy.NONE
    if name.isdigit() and earlier:  # Unseal Key 1
        found = [earlier.pop()]
    last = (earlier + found)[-2:]
    if last[-1:] == ["codes"]:
        last[-1] = "code"
    if tuple(last) in PAIRS or (last[-1:] == ["headers"] and {"otlp", "otel"} & set(found)):
        return Secrecy.SECRET
    while len(found) > 1 and (found[-1].isdigit() or found[-1] in AFTER):
        found.pop()
    if not found:
        return Secrecy.NONE
    if found[-1] not in STRONG and ({"api", "access", "auth"} & set(found) or name.isupper()):
        # What the secret is for may stand behind it: PYPI_TOKEN_PRIVATE, api_key_eu.
        middle = {"key", "token"} & set(found[1:-1])
        if middle and found[-1] not in ABOUT and not OTHER_TOKENS & set(found):
            return Secrecy.LIKELY
    others, capitals, alone = found[:-1] or earlier or [""], name.isupper(), len(found) == 1
    if STRONG & set(found) and found[-1] not in ABOUT:
        return Secrecy.LIKELY if found == ["pwd"] else Secrecy.SECRET  # or a directory
    return classify_last_word(found[-1], others, capitals=capitals, is_single_word=alone)


def classify_last_word(
    last_word: str, earlier_words: list[str], *, capitals: bool, is_single_word: bool
) -> Secrecy:
    """What a name says by its last word and those before it, or by the one before it."""
    qualifier = earlier_words[-1]
    if last_word in {"id", "ids"}:
        rights = {"key", "secret"} & set(earlier_words)
        if qualifier in {"session", "sess"}:
            return Secrecy.MAYBE
        return (
            Secrecy.SECRET
            if rights and {"access", "private"} & set(earlier_words)
            else Secrecy.NONE
        )
    if last_word in ABOUT:
        return Secrecy.NONE
    if last_word in {"pin", "otp", "totp"}:
        return Secrecy.NONE if qualifier in OTHER_PINS else Secrecy.SECRET
    if (
        last_word.endswith(("pat", "sas"))
        and len(last_word) <= 5
        and (capitals or not is_single_word or qualifier in GIVE_PATS)
    ):
        return Secrecy.SECRET
    if last_word in {"key", "keys"} or last_word.endswith("key"):
        return classify_key(last_word, qualifier, capitals=capitals, is_single_word=is_single_word)
    if last_word in {"token", "tokens"}:
        return classify_token(
            last_word, qualifier, capitals=capitals, is_single_word=is_single_word
        )
    if last_word.endswith("pass"):
        return classify_pass(last_word, qualifier, is_single_word=is_single_word)
    if last_word.removesuffix("s").endswith(ENDINGS):
        return Secrecy.SECRET
    if last_word in {"auth", "sig", "signature", "salt", "hmac", "session", "sid", "community"}:
        # "signature: (self, x)" is a function's; X-Amz-Signature is a secret.
        return Secrecy.SECRET if capitals or "amz" in earlier_words else Secrecy.LIKELY
    if last_word.endswith(("auth", "pwd", "tok", "token", "sess")):
        return Secrecy.LIKELY
    return Secrecy.NONE


def classify_key(
    last_word: str, qualifier: str, *, capitals: bool, is_single_word: bool
) -> Secrecy:
    if last_word in OTHER_KEY_WORDS or qualifier in OTHER_KEYS:
        return Secrecy.NONE
    if qualifier in {"primary", "secondary"}:  # a table's, or one of two that give rights
        return Secrecy.LIKELY
    if last_word == "keys":
        if qualifier in RIGHTS_OF_KEYS or capitals:
            return Secrecy.SECRET
        return Secrecy.MAYBE if is_single_word or qualifier in GIVEN else Secrecy.NONE
    if is_single_word and last_word == "key" and not capitals:
        return Secrecy.SECRET if qualifier in RIGHTS_OF_KEYS else Secrecy.MAYBE
    return Secrecy.SECRET


def classify_token(
    last_word: str, qualifier: str, *, capitals: bool, is_single_word: bool
) -> Secrecy:
    if qualifier in RIGHTS:
        return Secrecy.SECRET
    if qualifier in OTHER_TOKENS:
        return Secrecy.LIKELY if capitals and last_word == "token" else Secrecy.NONE
    if last_word == "tokens":
        return Secrecy.LIKELY if capitals or is_single_word or qualifier in GIVEN else Secrecy.MAYBE
    return Secrecy.LIKELY if is_single_word and not capitals else Secrecy.SECRET


def classify_pass(last_word: str, qualifier: str, *, is_single_word: bool) -> Secrecy:
    if last_word in PASS_WORDS or (last_word == "pass" and qualifier in OTHER_PASSES):
        return Secrecy.NONE
    return Secrecy.LIKELY if is_single_word and last_word == "pass" else Secrecy.SECRET


@functools.lru_cache(4096)
def classify_name(name: str, preceding_words: str = "") -> Secrecy:
    """What a name says of its value.

    Args:
        name: a variable's, an option's, a field's, or the last word of several.
        preceding_words: the words before it in a sentence.
    """
    name = name.strip("-_.$")[-100:]
    if FOREIGN.search(name.lower()):
        return Secrecy.SECRET
    if not any(stem in f"{preceding_words} {name}".lower() for stem in STEMS) or SOURCE.search(
        name
    ):
        return Secrecy.NONE
    # Of options and properties in dots the last part counts, and others where it is a word alone.
    return classify_words(name, preceding_words if re.fullmatch(r"[A-Za-z]+|\d", name) else "")
