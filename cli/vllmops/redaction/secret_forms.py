r"""What looks like a secret by its form alone: a table, which the redactor and its test read.

The examples hold no secret: ``{w20}`` stands for twenty random characters, which the test draws:
``w`` letters and digits, ``l`` small letters and digits, ``u`` capitals and digits, ``d`` digits,
``h`` hex, ``b`` base64.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

MARK = "[redacted]"


@dataclass(frozen=True)
class SecretForm:
    """One form of secrets.

    Args:
        name: what it is, as the index of a bundle counts it.
        has: each line with it has one of these, in small letters; a quick look before the pattern.
        pattern: what is taken out; a group ``keep`` before it stays.
        goes: an example that must go.
        stays: a line that looks like it, and must stay as it is.
    """

    name: str
    has: tuple[str, ...]
    pattern: re.Pattern[str]
    goes: str
    stays: str


def make_form(name: str, has: str, pattern: str, goes: str, stays: str) -> SecretForm:
    return SecretForm(name, tuple(has.split("|")), re.compile(pattern), goes, stays)


def make_token_form(
    name: str, start: str, rest_pattern: str, goes: str, stays: str, has: str = ""
) -> SecretForm:
    """A form that begins with letters of its own, in the midst of no word."""
    has = has or re.split(r"[\[(?\\]", start)[0].lower()
    return make_form(name, has, rf"(?<![A-Za-z0-9]){start}{rest_pattern}", goes, stays)


FORMS = (
    # -- tokens that tell whose they are by how they begin
    make_token_form("Hugging Face token", "hf_", r"(?:(?=[a-z]{0,40}[A-Z0-9])[A-Za-z0-9]{8,}|[a-z]{20,})", "hf_{w34}", "hf_overrides={}, hf_config=None"),
    make_token_form("OpenAI key", "sk-", r"(?:(?:proj|ant|or|svcacct|admin|None|lf|litellm)-[\w-]{4,}|(?=[\w-]*\d)[\w-]{10,}|(?=\w*\d)\w{4,})", "sk-proj-{w40}", "sk-learn-compat is on"),
    make_token_form("Stripe key", "[srp]k_(?:live|test)_", r"\w{6,}", "rk_live_{w24}", "risk_test_suite passed", has="k_live_|k_test_"),
    make_token_form("Stripe webhook key", "whsec_", r"[\w+/=]{8,}", "whsec_{b32}", "whsec_ is how they begin"),
    make_token_form("GitHub token", "gh[pousr]_", r"\w{10,}", "ghp_{w36}", "ghost key in the cache"),
    make_token_form("GitHub token", "github_pat_", r"\w{10,}", "github_pat_{w22}_{w59}", "github_pat_ is how they begin"),
    make_token_form("GitLab token", "gl[a-z]{2,6}-", r"(?=[\w.-]{0,200}[A-Z0-9])[\w.-]{16,}", "glpat-{w20}", "glibc-compatible-builds-only"),
    make_token_form("GitLab token", "GR1348941", r"[\w-]{10,}", "GR1348941{w20}", "GR1348941"),
    make_token_form("Slack token", "xox[a-z]-", r"[\w-]{8,}", "xoxb-{d12}-{d12}-{w24}", "xoxo"),
    make_token_form("Slack token", "xapp-", r"[\w-]{8,}", "xapp-1-A{u10}-{d13}-{h64}", "xapp is none"),
    make_token_form("NVIDIA key", "nvapi-", r"[\w-]{10,}", "nvapi-{w60}", "nvapi-docs"),
    make_token_form("Google key", "AIza", r"[\w-]{20,}", "AIza{w35}", "AIza"),
    make_token_form("Google OAuth token", "ya29", r"\.[\w.-]{10,}", "ya29.{w60}", "ya29 is none"),
    make_token_form("Google OAuth token", "GOCSPX", r"-[\w-]{10,}", "GOCSPX-{w28}", "GOCSPX"),
    make_token_form("Google OAuth token", "1//0", r"[\w-]{10,}", "1//0{w40}", "1//0 of them"),
    make_token_form("Google OAuth token", "4/0", r"A[\w-]{20,}", "4/0A{w60}", "4/0 done"),
    make_token_form("AWS key id", "(?:AKIA|ASIA|ABIA|ACCA)", r"[A-Z0-9]{12,}\w*", "AKIA{u16}", "ASIA-PACIFIC is a region", has="akia|asia|abia|acca"),
    make_token_form("AWS Bedrock key", "ABSK", r"[A-Za-z0-9+/]{30,}={0,2}", "ABSK{b60}", "ABSK"),
    make_token_form("SendGrid key", "SG", r"\.[\w-]{16,}\.[\w-]{16,}", "SG.{w22}.{w43}", "SG.x.y"),
    make_token_form("npm token", "npm_", r"(?=[a-z_]{0,60}[A-Z0-9])[A-Za-z0-9]{20,}", "npm_{w36}", "npm_config_registry=x"),
    make_token_form("PyPI token", "pypi-", r"[\w-]{16,}", "pypi-AgEIcHlwaS5vcmc{w60}", "pypi-mirror"),
    make_token_form("Docker token", "dckr_", r"(?:pat|oat)_[\w-]{10,}", "dckr_pat_{w27}", "dckr_ps"),
    make_token_form("Vault token", "hv[sbr]", r"\.(?=[\w-]{0,200}[A-Z0-9])[\w-]{16,}", "hvs.{w90}", "hvs.is_a_prefix_of_tokens"),
    make_token_form("Vault token", "[sb]", r"\.(?=[a-z0-9]*[A-Z])(?=[A-Za-z]*\d)[A-Za-z0-9]{24}(?!\w)", "s.{w24}", "s.abcdefghijklmnopqrstuvwx", has="s.|b."),
    make_token_form("Databricks token", "dapi", r"[0-9a-fA-F]{16,}(?:-\d+)?", "dapi{h32}", "dapi_version=2"),
    make_token_form("Databricks token", "dose", r"[0-9a-f]{30,}", "dose{h32}", "doses"),
    make_token_form("Twilio key", "(?:SK|AC)", r"(?=[0-9a-f]{0,31}\d)[0-9a-f]{32}", "SK{h32}", "SKIPPED", has="sk|ac"),
    make_token_form("DigitalOcean token", "do[opr]_v1_", r"[a-f0-9]{20,}", "dop_v1_{h64}", "do_v1 it"),
    make_token_form("Telegram token", r"\d{8,10}:A", r"A[\w-]{30,}", "{d10}:AA{w33}", "1234567890:AA", has=":aa"),
    make_token_form("Replicate token", "r8_", r"[A-Za-z0-9]{20,}", "r8_{w37}", "r8_is_a_register"),
    make_token_form("Groq key", "gsk_", r"\w{20,}", "gsk_{w52}", "gsk_"),
    make_token_form("xAI key", "xai-", r"\w{20,}", "xai-{w80}", "xai-grok-beta"),
    make_token_form("Perplexity key", "pplx-", r"\w{20,}", "pplx-{w48}", "pplx-api"),
    make_token_form("Fireworks key", "fw_", r"(?=[a-z_]{0,60}[A-Z0-9])[A-Za-z0-9]{16,}", "fw_{w24}", "fw_version"),
    make_token_form("Tavily key", "tvly-", r"[\w-]{12,}", "tvly-{w32}", "tvly-sdk"),
    make_token_form("LangSmith key", "ls(?:v2_(?:pt|sk)|__)_?", r"\w{16,}", "lsv2_pt_{h32}_{h10}", "ls -l"),
    make_token_form("Langfuse key", "pk-lf-", r"[\w-]{16,}", "pk-lf-{h32}", "pk-lf"),
    make_token_form("Anyscale key", "(?:esecret|aph0)_", r"\w{16,}", "esecret_{w24}", "esecret_", has="esecret|aph0"),
    make_token_form("Weights & Biases key", "wandb_v1_", r"\w{16,}", "wandb_v1_{w60}", "wandb_version"),
    make_token_form("Grafana token", "gl(?:sa|c)_", r"[\w+/=]{16,}", "glsa_{w32}_{h8}", "glsa_x"),
    make_token_form("Shopify token", "shp(?:at|ca|pa|ss|tka)_", r"\w{16,}", "shpat_{h32}", "ships"),
    make_token_form("Linear key", "lin_(?:api|oauth)_", r"\w{16,}", "lin_api_{w40}", "lin_api_x"),
    make_token_form("Notion token", "(?:ntn_|secret_(?=[A-Za-z]*\\d))", r"[A-Za-z0-9]{30,}", "ntn_{w46}", "ntn_x", has="ntn_|secret_"),
    make_token_form("Atlassian token", "ATATT3", r"[\w=-]{20,}", "ATATT3{w60}", "ATATT3"),
    make_token_form("Postman key", "PMAK-", r"[\w-]{20,}", "PMAK-{h24}-{h34}", "PMAK-x"),
    make_token_form("Doppler token", r"dp\.(?:pt|st|ct|sa|scim|audit)\.", r"[\w.-]{16,}", "dp.pt.{w43}", "dp.pt.x"),
    make_token_form("Pulumi token", "pul-", r"[0-9a-f]{30,}", "pul-{h40}", "pul-x"),
    make_token_form("Terraform token", r"[A-Za-z0-9]{14}\.atlasv1\.", r"[\w=-]{20,}", "{w14}.atlasv1.{w64}", "a.atlasv1.b", has=".atlasv1."),
    make_token_form("RubyGems key", "rubygems_", r"[0-9a-f]{30,}", "rubygems_{h48}", "rubygems_api"),
    make_token_form("crates.io token", "cio", r"(?=[a-zA-Z]*\d)[A-Za-z0-9]{32}(?!\w)", "cio{w32}", "cio"),
    make_token_form("age key", "AGE-SECRET-KEY-1", r"[A-Z0-9]{20,}", "AGE-SECRET-KEY-1{u58}", "AGE-SECRET-KEY-1"),
    make_token_form("New Relic key", "NR(?:AK|JS|AA|RA)-", r"[\w-]{16,}", "NRAK-{u27}", "NRAK-x"),
    make_token_form("Mailgun key", "key-", r"(?=[a-z]*\d)[0-9a-z]{32}(?!\w)", "key-{h32}", "key-value"),
    make_token_form("Mailchimp key", r"(?=[0-9a-f]{32}-us\d)", r"[0-9a-f]{32}-us\d{1,2}", "{h32}-us12", "in us-east-1", has="-us"),
    make_token_form("Sentry token", "sntry[su]_", r"[\w+/=]{16,}", "sntrys_{w60}", "sntry"),
    make_token_form("Azure client secret", r"[\w~.-]{3}8Q~", r"[\w~.-]{30,}", "{l3}8Q~{w34}", "8Q~", has="8q~"),
    make_token_form("1Password token", "ops_eyJ", r"[\w=-]{20,}", "ops_eyJ{w60}", "ops_eyJ"),
    make_token_form("Flutterwave, Tailscale and others' key", "(?:tskey|fo1|flyv1|fm2|dnkey|ngrok|ditto)[-_]", r"[\w-]{16,}", "tskey-auth-{w20}-{w20}", "tskey-x", has="tskey|fo1|flyv1|fm2|dnkey|ngrok|ditto"),
    make_token_form("PlanetScale token", "pscale_(?:tkn|oauth|pw)_", r"[\w.=-]{16,}", "pscale_tkn_{w43}", "pscale_x"),
    make_token_form("Supabase token", "sb[pa]?_(?:secret_|publishable_)?", r"(?=[\w-]*\d)[\w-]{24,}", "sbp_{h40}", "sb_x"),
    make_token_form("Artifactory key", "AKCp", r"[A-Za-z0-9]{16,}", "AKCp{w69}", "AKCp"),
    make_token_form("JWT", "eyJ", r"[\w-]{8,}\.[\w-]{8,}\.?[\w-]*", "eyJ{w20}.eyJ{w40}.{w43}", "eyJ.eyJ.x"),
    make_token_form("Fernet token", "gAAAAA", r"[\w-]{20,}={0,2}", "gAAAAA{w90}==", "gAAAAA"),
    make_form("password hash", "{sha|{ssha|{crypt}|{md5}|{smd5}|$apr1$|$1$", r"(?:\{(?i:s?sha\d*|crypt|s?md5)\}|\$(?:apr1|1)\$)[\w./$+=-]{8,}", "bob:{SSHA}{w32}", "{SHA} of it"),
    make_token_form("password hash", r"\$(?:2[abxy]|5|6|y|argon2(?:id|i|d)|pbkdf2[\w-]*)\$", r"[\w./$,=+-]{16,}", "$2b$12${w53}", "costs $5 each", has="$2|$5|$6|$y|$argon2|$pbkdf2"),
    # -- keys in files
    make_form("private key", "private key", r"-----BEGIN [A-Z0-9 ]{0,40}PRIVATE KEY(?: BLOCK)?-----.*?(?:-----END [A-Z0-9 ]{0,40}KEY(?: BLOCK)?-----|$)", "-----BEGIN PRIVATE KEY-----{b60}-----END PRIVATE KEY-----", "-----BEGIN PUBLIC KEY-----"),
    make_form("private key", "ls0tls1crudjti", r"LS0tLS1CRUdJTi[A-Za-z0-9+/=_-]{8,}", "LS0tLS1CRUdJTi{b60}", "LS0tLS1CRUdJTi"),
    # -- a conversation's state, as clients carry it
    make_form("carrier", "vllm:", r"\bvllm:\d+:[A-Za-z0-9+/=_\-]{16,}(?::[0-9a-fA-F]{32,})?", "vllm:1:{b64}:{h64}", "vllm:1:x"),
    make_form("media", ";base64,", r"(?P<keep>data:[\w.+-]+/[\w.+-]+(?:;[\w=.-]+){0,9};base64,)[\w+/=%-]{8,}", "data:image/png;base64,{b80}", "data:image/png;base64,"),
    # -- in URLs
    make_form("URL credentials", "://", r"(?P<keep>\b[A-Za-z][A-Za-z0-9+.-]{1,30}://)(?:[^\s/@:'\"<>]*:(?!\d{1,5}(?:[/?#]|$))[^\s'\"<>]*|(?![a-z][a-z_.-]{0,24}@)[^\s/?#@'\"<>]+)(?=@(?!sha\d{3}:))", "postgresql://u:{w20}@db:5432/x", "http://127.0.0.1:8000/a@b"),
    make_form("webhook", "/services/", r"(?P<keep>\bhooks\.slack(?:-gov)?\.com/)(?:services|workflows|triggers)/[^\s\"'<>]+", "https://hooks.slack.com/services/T{u8}/B{u8}/{w24}", "GET /services/x HTTP/1.1"),
    make_form("webhook", "/webhook", r"(?P<keep>\b[\w.-]*\.(?:com|net|io|dev|cloud|org|us)(?::\d+)?(?:/[\w.-]+){0,4}?/webhooks?(?:b2)?/)[^\s\"'<>]+", "https://discord.com/api/webhooks/{d18}/{w68}", "docs say /webhook is not served"),
    make_form("webhook", "hook/|hooks/|/integration/|/incoming/", r"(?P<keep>\bhttps?://[\w.:-]+/(?:[\w.-]+/){0,4}(?:[\w-]{0,20}hooks?|integration|incoming)/)[^\s\"'<>]{4,}", "https://chat.example.com/hooks/{l26}", "git/hooks/pre-commit"),
    make_form("webhook", "://hooks.|://webhook", r"(?P<keep>\bhttps?://(?:web)?hooks?\.[\w.:-]+/)[^\s\"'<>]+", "https://hooks.example.com/alert/{w16}", "https://hooks.example.com"),
    make_form("webhook", "webhook.office.com", r"(?P<keep>webhook\.office\.com/)[^\s\"'<>]+", "https://x.webhook.office.com/webhookb2/{h32}@{h32}/IncomingWebhook/{h32}/{h32}", "webhook.office.com is down"),
    make_form("webhook", "api.telegram.org/bot", r"(?P<keep>api\.telegram\.org/bot)[^\s\"'<>/]+", "https://api.telegram.org/bot{d9}:{w35}/sendMessage", "api.telegram.org/bot is it"),
    make_form("webhook", "/triggers/", r"(?P<keep>logic\.azure\.com(?::\d+)?/)[^\s\"'<>]+", "https://prod-1.westus.logic.azure.com:443/workflows/{h32}/triggers/manual/paths/invoke?sig={w43}", "see /triggers/ of them"),
    make_form("URL query", "?|&|;", r"(?P<keep>[?&;](?i:(?:\w{0,30}[_-])?(?:key|code|token|sig|signature|auth|pass|pwd|sid|session|jwt|credential|secret|password|apikey|access_token|state|assertion|ticket))=)(?!\[redacted\]|&)[^\s&\"'<>#;]+", "GET /v1/models?key={l12} HTTP/1.1", "GET /v1/models?limit=5 HTTP/1.1"),
    make_form("URL query", "#", r"(?P<keep>#(?:[\w.-]+=[^\s&#]*&){0,9}(?i:access_token|id_token|token|key|code|auth|secret)=)(?!\[redacted\])[^\s&\"'<>#]+", "http://h/ui#access_token={w30}&x=1", "see #1 and key=x"),
    make_form("URL path", "://", r"(?P<keep>\bhttps?://[\w.:@-]+/(?:[\w.~-]+/){0,6}(?:t|token|key|secret|auth|api-?key|invite|reset[\w-]*|verify|confirm)/)(?!\[redacted)(?=[^\s/]*\d)[^\s/\"'<>?#&]{8,}", "https://conda.local/t/{w20}/main", "http://h/v1/key/values"),
    # -- in headers and command lines
    make_form("login", "users|accounts|logins", r"(?P<keep>\b(?:\w{1,30}_)?(?:users|accounts|logins)[\"']?\s?[:=]\s?\{)(?=[^{}]{0,200}:\s?[\"'][^\"'{}]{0,80}[\d!#$%^*])(?=(?:[\"']?[\w.@-]{1,60}[\"']?:\s?[\"'][^\"'\s{}]+[\"'](?:,\s?|(?=\}))){1,50}\})[^{}]+", "users={'bob': '{w12}'}", "users={'bob': 'admin', 'n': 3}"),
    make_form("bearer token", "bearer", r"(?P<keep>[\"'](?i:bearer)\s)(?!\[redacted)(?=[^\"'\s]*\d)[^\"'\s]{6,}(?=[\"'])", "'Bearer a;{w12}'", "'Bearer authentication'"),
    make_form("bearer token", "bearer", r"(?P<keep>\b(?i:bearer)(?:%20|[\s:=]{1,3})b?[\"']?)(?!\[redacted|(?i:token|auth|scheme|format|header|is|or|and|in|not|was|authentication|authorization)\b|(?:expires_in|scope|realm|error|refresh_token)=)[^\s\"'<>,;)\]}]{8,}", "Bearer {w24}", "bearer token, bearer authentication"),
    make_form("basic credentials", "basic", r"(?P<keep>\b(?i:basic)(?:%20|\s))(?=[A-Za-z0-9+/]{0,40}(?:\d|[a-z][A-Z]|[+/=]))[A-Za-z0-9+/]{8,}={0,2}(?![\w.])", "Basic dX{b30}", "Basic Algorithm."),
    make_form("header token", "authorization", r"(?P<keep>\b(?i:authorization)[\"']?\s?[:=,]\s?b?[\"']?(?i:token|apikey|key|aws4-hmac-sha256|digest|negotiate|ntlm|hawk)\s)[^\"'\r\n]{4,}", "Authorization: Token {w20}", "authorization is off"),
    make_form("login", "curl|-u|--user|http|xh |etcdctl|lftp", r"(?P<keep>\b(?:curl|https?(?=\s)|xh|etcdctl|lftp)\b.{0,400}?\s(?:-[a-zA-Z]{0,5}u|--user|-U|--proxy-user|-a|--auth)[ =]?[\"']?|^\s*(?:-u|--user)[ =][\"']?(?!\d+:\d))(?!\[redacted)[^\s\"':]*[\"']?:[\"']?[^\s\"']+", "curl -s -u admin:{w12} http://h/x", "curl -s http://h/x"),
    make_form("login", "-p|-w|-n", r"(?P<keep>\b(?:cqlsh|useradd|usermod|twine|ipmitool|mosquitto_\w+|sqlcmd|bcp|crane|nerdctl|apptainer|singularity|7z|(?:un)?zip|ssh-keygen|sshpass|docker(?! compose)|podman(?! compose)|mysql\w*|mariadb|mongo\w*|ldapsearch|smbclient|helm|az|oc|vault|rabbitmqadmin|rdesktop|hydra|medusa|evil-winrm|crackmapexec|netexec|nxc|security)\b.{0,400}?[\s\"'](?:-p|-P|-w|(?<=-keygen )-N)[ =]?[\"']?)(?!\[redacted|\d{1,5}[: ]|\d{1,5}$)[^\s\"':]{4,}(?![^\s\"']*:)", "sshpass -p {w12} ssh h", "docker run -p 8000:8000 vllm"),
    make_form("login", "sshpass|ldap|mysql|mariadb|login", r"(?P<keep>\b(?:sshpass|ldap\w+|(?:docker|podman)[\s\"',]+login|mysql\w*|mariadb\w*)\b.{0,400}?[\s\"'](?:-p|-w)(?:[\"'],\s?|[ =])?)(?:\"(?:[^\"\\]|\\.)+\"|'[^']*'(?:\"'\"'[^']*')*|(?<=-[pw][ =])(?!\[redacted)[^\s\"']{4,})", "ldapsearch -D cn=a -w '{w12} a:b' -b dc=b", "ldapsearch -x -b dc=b"),
    make_form("login", "**", r"(?P<keep>\*\*[^*\n]{0,30}\b(?i:password|passwort|passphrase|secret|token|api[ -]?key|pw)\b[^*\n]{0,20}(?::\*\*|\*\*\s?[:=])\s*`?)(?![\[<*])[^\s`]+", "**Password:** {w12}", "the **password** rules"),
    make_form("PagerDuty key", "_key", r"(?P<keep>\b(?:routing|integration|service)_key[\"']?\s?[:=]\s?[\"']?)(?=[0-9a-zA-Z-]*\d)[0-9a-zA-Z-]{12,}", "routing_key: {h32}", "routing_key: tasks.default"),
    make_form("login", "snmp|influx|curl", r"(?P<keep>\b(?:snmp\w+\b.{0,100}?\s-c|influx\b.{0,200}?\s(?:-t|--token)|curl\b.{0,400}?\s(?:-b\s?[\"']?[\w.-]{1,60}=|(?:-E|--cert)[ =]\S{1,200}?:))[ =]?[\"']?)(?!\[redacted)[^\s\"';]{6,}", "snmpwalk -v2c -c {w12} h", "curl -b jar.txt http://h"),
    make_form("login", "rabbitmqctl|http-basic", r"(?P<keep>\b(?:rabbitmqctl\b.{0,60}?\s(?:add_user|change_password)|http-basic\.\S+)\s+\S+\s+[\"']?)[^\s\"']+", "rabbitmqctl add_user svc {w12}", "rabbitmqctl list_users"),
    make_form("login", "auth|super", r"(?P<keep>\b(?i:digest:\w+|stats auth [\w.@-]+):)[^\s:]{4,}", "stats auth admin:{w12}", "stats auth is off"),
    make_form("login", "thin|oci", r"(?P<keep>\bjdbc:oracle:(?:thin|oci):[\w.-]{1,60}/)[^\s/]+(?=@)", "jdbc:oracle:thin:scott/{w12}@//h:1521/x", "jdbc:oracle:thin:@//h:1521/x"),
    make_form("login", "admin|root|user", r"(?P<keep>\b(?i:log(?:in|ged in|ging in)?|use|creds?|account|user(?:name)?)\b[: ].{0,20}?\b(?:admin|root|user\w{0,10})\s?/\s?)(?=\S*\d)[^\s/\"']{8,}(?![^\s]*/)", "login: admin / {w12}", "use /home/user/models"),
    make_form("login", "sqlplus|connect|impdp|expdp|sqlldr", r"(?P<keep>\b(?:sqlplus|CONNECT|connect|impdp|expdp|sqlldr)\s+\w{1,60}/)(?=[^\s@/]*\d)[^\s@/]{4,}(?=@|\s|$)", "sqlplus scott/{w12}@//h:1521/x", "connect a/b/c"),
    make_form("login", "htpasswd", r"(?P<keep>\bhtpasswd\s+-(?:(?=\w*n)\w*b\w*\s+|(?!\w*n)\w*b\w*\s+\S+\s+)\S+\s+[\"']?)(?!\[redacted)[^\s\"']+", "htpasswd -bc f bob {w12}", "htpasswd -v file bob"),
    make_form("login", "authtoken|auth |login ", r"(?P<keep>\b(?:(?:add-)?authtoken|(?:snyk|railway|flyctl|fly|heroku|vercel|netlify|doctl|infisical|pulumi|replicate|modal)\s+(?:auth|login)(?:\s+token)?)\s+[\"']?)(?=\S*\d)(?!-|\[redacted)[^\s\"']{8,}", "ngrok config add-authtoken {w49}", "snyk auth --help"),
    make_form("login", "/p", r"(?P<keep>(?<=\s)/(?i:p|pw|pass|pwd|password):[\"']?)(?!\[redacted)[^\s\"']{4,}", "xfreerdp /u:bob /p:{w12} /v:h", "cp /p/q /pass"),
    make_form("login", "secret set|variable set", r"(?P<keep>\b(?:gh|glab)\s+(?:secret|variable)\s+set\b.{0,200}?\s(?:-b|--body|-v|--value)[ =]?[\"']?)(?!\[redacted)[^\s\"']+", "gh secret set X -b {w12}", "gh secret set X < file"),
    make_form("login", "mysqladmin", r"(?P<keep>\bmysqladmin\b.{0,200}?\spassword\s+[\"']?)(?!\[redacted)[^\s\"']+", "mysqladmin -u root password {w12}", "mysqladmin status"),
    make_form("login", "wpa_passphrase|radtest|nmcli", r"(?P<keep>\b(?:wpa_passphrase\s+(?:\"[^\"]*\"|\S+)|radtest\s+\S+|nmcli\b.{0,200}?\spassword)\s+[\"']?)(?!\[redacted)[^\s\"']+", "nmcli dev wifi connect h password {w12}", "nmcli dev wifi"),
    make_form("login", "snmp", r"(?P<keep>\bsnmp\w+\b.{0,200}?\s-[AX][ =]?[\"']?)(?!\[redacted)[^\s\"']{4,}", "snmpget -v3 -u bob -A {w12} h", "snmpget -v2c h"),
    make_form("login", "snmp", r"(?P<keep>\bsnmp\w+\b.{0,300}?\s-X[ =]?[\"']?)(?!\[redacted)[^\s\"']{4,}", "snmpget -v3 -u bob -X {w12} h", "snmpget -v3 h"),
    make_form("login", "net use|net user", r"(?P<keep>\bnet\s+(?:use\s+(?:\w:\s+)?\\\\\S+|user\s+[\w.-]+)\s+)(?![/*\[])(?=\S*\d)\S{4,}", r"net use \\h\x {w12} /user:bob", "net use of memory"),
    make_form("login", "securestring", r"(?P<keep>\bConvertTo-SecureString\s+(?:-String\s+)?[\"']?)(?![-$]|\[redacted)[^\s\"']+", "ConvertTo-SecureString '{w20}' -AsPlainText -Force", "ConvertTo-SecureString $x"),
    make_form("login", "lftp", r"(?P<keep>\blftp\b.{0,200}?\s-u\s?[^\s,]+,)[^\s\"']+", "lftp -u bob,{w12} h", "lftp -u bob h"),
    make_form("login", "iscsiadm", r"(?P<keep>\biscsiadm\b.{0,300}?\bauth\.\w*password\w*\s+(?:-v|--value)[ =])[^\s\"']+", "iscsiadm -m node -n node.session.auth.password -v {w12}", "iscsiadm -m node"),
    make_form("login", "obscure|passwd|_pw", r"(?P<keep>\b(?:rclone\s+obscure|openssl\s+passwd(?:\s+-\w+)*|(?:user|owner|input)_pw)\s+[\"']?)(?![-<]|\[redacted)[^\s\"']+", "rclone obscure {w12}", "openssl passwd -help"),
    make_form("login", "<<<", r"(?P<keep>\b(?:chpasswd\s*<<<\s*[\"']?[\w.-]+:|(?:kinit|login|passwd|su)\b.{0,60}<<<\s*[\"']?))(?![$\[])[^\s\"']+", "chpasswd <<< u:{w12}", "chpasswd is off"),
    make_form("login", "login|pass ", r"(?P<keep>(?:\bLOGIN \S{1,60}|(?<![^\s>])PASS) [\"']?)(?=\S*\d)[^\s\"'/.=]{6,}(?=[\"']?(?:\s|$))", "IMAP LOGIN bob {w12}", "LOGIN is off"),
    make_form("mask", "add-mask|set-output", r"(?P<keep>::(?:add-mask|set-output name=\w{0,40}(?:token|secret|passw|key)\w{0,20})::)[^\s\"']+", "::add-mask::{w12}", "add-mask"),
    make_form("login", "redis-cli|valkey-cli|keydb-cli", r"(?P<keep>\b(?:redis|valkey|keydb)-cli\b.{0,200}?\s(?:-a|--pass)[ =]?[\"']?)(?!\[redacted)[^\s\"']+", "redis-cli -a {w12} ping", "redis-cli ping"),
    make_form("login", "login", r"(?P<keep>\b(?i:login)\s+\S{1,100}\s+(?:account\s+\S{1,100}\s+)?(?i:password|passwd|pass)\s+)(?!\[redacted)\S+", "machine h login u password {w12}", "login is off"),
    make_form("login", "password", r"(?P<keep>^\s+password\s+(?=\S+\s*$)|^password\s+(?![a-z]+\s*$))(?!\[redacted)[^\s:=]+(?=\s*$)", "password {w12}", "password auth"),
    make_form("login", ":5|:6|:1|:*:", r"(?P<keep>(?<![^\s\"'])[\w.*-]{1,100}:(?:\d{4,5}|\*):[\w*-]{1,63}:[\w.*-]{1,63}:)(?!\d{1,5}(?:\s|$)|\[redacted)[^\s\"':]+", "db.local:5432:app:vllm:{w12}", "file.py:1234: a: b"),
    make_form("login", "echo |printf ", r"(?P<keep>\b(?:echo|printf)\s+(?:-\w+\s+|['\"]%s\S*\s+)?[\"']?)(?![$\[`])[^|\n]{1,200}?(?=[\"']?\s*\|\s*(?:sudo\s+)?(?:(?:docker|podman|helm|gh|oc|az|kubectl|skopeo|buildah|crane|hf|wandb)\b.{0,80}\blogin\b|cryptsetup|kinit|ssh-add|(?:ch|ht)?passwd\b|gpg\b.{0,80}--passphrase-fd))", "echo '{w12}!a b' | kinit u@EXAMPLE.ORG", "echo one two | grep kinit"),
    make_form("login", "login", r"(?P<keep>\b(?:cargo|vault|wandb|huggingface-cli|hf auth|hf|neptune|comet|ngc|replicate)\s+login\s+(?:-{1,2}\S+\s+){0,3})(?![a-z]+(?:\s|$)|-|\[redacted)\S{6,}", "wandb login {h40}", "wandb login failed"),
    make_form("login", "sudo", r"(?P<keep>\b(?:echo|printf)\s+(?:-\w+\s+)?[\"']?)(?![$\[`])[^|\n]{1,200}?(?=[\"']?\s*\|\s*sudo\s+(?:-\w+\s+){0,3}-S)", "echo {w12} | sudo -S reboot", "echo sudo -S"),
    make_form("login", "smbclient|rpcclient", r"(?P<keep>\b(?:smb|rpc)client\b.{0,200}?\s-U[ =]?[\"']?[\w.@\\/-]+%|\bsmbclient\s+//\S+\s+(?!-|\[redacted)(?=\S*\d))[^\s\"']+", "smbclient //h/x -U bob%{w12}", "smbclient //h/x -U bob"),
    make_form("login", "alias set", r"(?P<keep>\bmc\b.{0,80}?\balias set \S+ \S+ )\S+ \S+", "mc alias set m http://h {w12} {w20}", "mc alias set -h"),
    make_form("login", "login|logon|log in|logged in|logging in|auth", r"(?P<keep>\b(?i:login|logon|log in|logg(?:ed|ing) in|auth(?:enticat\w+)?)\b[^:\n]{0,40}?\s(?:for|as|with|by)\s(?:user )?[\"']?[\w.@-]{1,60}[:/])(?!//|\d{1,5}(?:[/?#\s]|$))(?=\S*\d)[^\s\"',;)]{6,}", "login failed for bob:{w12}", "authenticated as bob: 127.0.0.1"),
    make_form("login", "digest", r"(?P<keep>\bDigest\s.{0,400}?\bresponse=[\"']?)[0-9a-f]{16,}", "Digest username=u, response={h32}", "Digest is off"),
    make_form("login", "auth(|login(|credentials(|credential(|minio(|bind(|bind_s(", r"(?P<keep>\b\w*(?i:(?:basic|digest|proxy)auth|login|credentials?|minio|bind(?:_s)?)\(\s?(?:\w+,\s?)?[bru]?[\"'][^\"']{0,100}[\"'],\s?[bru]?[\"'])[^\"']+(?:[\"'],\s?[\"'][^\"']+)?", "BasicAuth('u', '{w12}')", "login('u')"),
    make_form("login", "openai(|anthropic(|hfapi(|inferenceclient(|auth(|secretstr(|client(", r"(?P<keep>\b(?:Async|Azure)*(?:OpenAI|Anthropic|HfApi|InferenceClient|\w*(?:Token|Key|Bearer)Auth|SecretStr)\(\s?[bru]?[\"'])(?!https?:|\*)(?=[^\"']*\d)[^\"'\s]{6,}", "OpenAI('{w20}')", "OpenAI('http://h:8000/v1')"),
    make_form("Weights & Biases key", "wandb", r"(?P<keep>(?i:wandb).{0,200}?(?:\bkey=[\"']?|netrc file: ))[0-9a-f]{40}(?![0-9a-f])", "wandb.login(key='{h40}')", "wandb run 4dfb04f3173c1f2e4dfb04f3173c1f2e4dfb04f3"),
    make_form("login", "requirepass|masterauth|community", r"(?P<keep>\b(?:requirepass|masterauth|r[ow]community)\s+[\"']?)(?!\[redacted)[^\s\"']+", "CONFIG SET requirepass {w12}", "no requirepass"),
    make_form("login", "auth", r"(?P<keep>\"(?i:auth)\"\s(?:\"[^\"]*\"\s)?\")[^\"]{4,}(?=\")", '"HELLO" "3" "AUTH" "svc" "{w12}"', '"AUTH" is off'),
    make_form("login", "auth", r"(?P<keep>(?<![^\s\"'])AUTH\s+(?:\w{1,20}\s+)?)(?=\S*[\d=]|(?:[a-z]+-){2})[^\s\"':]{6,}(?=\s|$|[\"'])", "AUTH default {w12}", "AUTH is off"),
    make_form("login", "user", r"(?P<keep>\b(?i:setuser|user)\s\S{1,60}\s(?:on|off)\s.{0,40}?[>#])[^\s>]{4,}", "ACL SETUSER bob on >{w12} ~*", "user bob on a"),
    make_form("login", "identified", r"(?P<keep>\b(?i:identified (?:with \S{1,60} )?(?:by|as))\s+[\"'])[^\"']+", "CREATE USER u IDENTIFIED BY '{w12}'", "identified by its id"),
    make_form("login", "@", r"(?P<keep>(?<![\w/.@:-])[\w.-]{1,60}:)(?=[^\s@]{0,200}\d)(?!\d{1,5}@)[^\s:/@\"'<>]{6,}(?=@(?!sha\d{3}:)[\w.\[-]+[:(/])", "root:{w12}@tcp(h:3306)/d", "image:v0.32.0@sha256:0a"),
    make_form("login", "integer value as", r"(?P<keep>\binteger value as ['\"])[^'\"]+(?=@)", "Port could not be cast to integer value as '{w12}@h'", "integer value as 'x'"),
    make_form("secret in a file", "echo|printf", r"(?P<keep>\b(?:echo|printf)\s+(?:-n\s+|['\"]%s\S*\s+)?[\"']?)(?!\$)[^\s\"'|>]+(?=[\"']?\s*(?:>+\s*\S*(?:token|secret|passw|[_/.]key|cred)|\|.{0,40}\bsecret\b))", "echo {w12} > /run/secrets/x", "echo x > /tmp/y"),
    make_form("key of a call", "jwt.|hmac.|fernet(", r"(?P<keep>\b(?:jwt\.(?:de|en)code\([^,()]{1,200},\s*(?:key=)?|hmac\.(?:new|digest)\(|Fernet\()b?[\"'])[^\"']+", "jwt.encode(x, '{w12}')", "hmac.new(key, x)"),
    make_form("key of a call", "token(|secret(|key(|password(", r"(?P<keep>\b\w*(?:Token|Secret|ApiKey|APIKey|Password)\(.{0,40}?\b(?:value|key|raw)=[\"'])(?=[^\"']*\d)[^\"'\s]{6,}", "ApiKey(id='1', key='{w16}')", "Token(value=5)"),
    make_form("login", "openssl", r"(?P<keep>\bopenssl\b.{0,200}?\s-(?:k|K|pass|passin|passout)\s+(?:pass:)?)(?!\[redacted)\S+", "openssl enc -k {w12} -in x", "openssl version"),
    make_form("login", "--from-literal", r"(?P<keep>--from-literal[= ][\"']?[\w.-]{1,100}=)(?!\[redacted)[^\s\"']+", "kubectl create secret generic a --from-literal=a={w12}", "--from-literal"),
    make_form("login", "kv put|kv patch", r"(?P<keep>\bkv (?:put|patch)\s.{0,200}?\s[\w.-]{1,60}=)(?!\[redacted|@)[^\s\"']+", "vault kv put secret/x value={w12}", "kv put failed"),
    make_form("login", "auth=", r"(?P<keep>\bauth=\(\s?[bru]?[\"'][^\"']{0,100}[\"'],\s?[bru]?)(?:\"[^\"]+\"|'[^']+')", "get(h, auth=('u', '{w5} {w6}'))", "auth=('u', password)"),
    make_form("login", " password |-password ", r"(?P<keep>^\s*user\s+\S{1,100}\s+(?:insecure-)?password\s+)(?!\[redacted)\S+(?=\s*$)", "  user bob insecure-password {w12}", "  user bob groups a"),
    make_form("secret in a file", "tee ", r"(?P<keep>\b(?:echo|printf)\s+(?:-n\s+|['\"]%s\S*\s+)?)(?!\$)(?:\"[^\"]+\"|'[^']+'|[^\s\"'|>]+)(?=\s*\|\s*(?:sudo\s+)?tee\s.{0,100}(?:token|secret|passw|[_/.](?:key|pw)|_pass|cred))", "echo '{w12}' | tee /run/secrets/x", "echo x | tee /tmp/y"),
    make_form("answer to a question", "enter|type |paste", r"(?P<keep>^\W{0,4}(?i:(?:please )?(?:enter|type|paste))\b[^:\n]{0,60}\b(?i:tokens?|pass(?:word|phrase|code)|(?:api|access|secret) key|secret|pin)\b[^:\n]{0,60}:\s)(?!\[redacted)\S.*", "Enter your token (it is not shown): {w12}", "Enter your token:"),
    # -- in sentences
    make_form("named after it", "' as |\" as |` as ", r"(?P<keep>\b(?i:use|using|set|try|with|enter|type|put|give)\s[\"'`])[^\"'`]{4,}(?=[\"'`]\sas\s(?:(?:the|a|your|my|its|our|their)\s)?(?:[\w-]{1,30}\s){0,3}(?i:password|passphrase|passwd|token|secret|pin|(?:api|access|secret|signing) key)\b)", "use '{w12}' as the password", "use 'x' as the name"),
    make_form("login", "log in|login|sign in|logged in", r"(?P<keep>\b(?i:log ?in|logged in|sign in)\s(?:with|as)\s[\w.@-]{1,60}\s/\s)\S{4,}", "login with bob / {w12}", "log in with a / b"),
    make_form("named after it", "'api|'acc", r"(?P<keep>\b(?i:cl(?:é|ef)s?\s(?:d'|de l'))(?i:api|accès|acces)\s?[:=]\s?[\"'«]?\s?)[^\s\"'»]{4,}", "clé d'API : {w12}", "clé d'accès perdue"),
    make_form("named after it", "key", r"(?P<keep>)(?<=[\"'`])[^\s\"'`]{6,}(?=[\"'`][)\]}]? (?:is|was|isn't|wasn't) (?:(?:not|an?|no|the|invalid|valid|wrong|incorrect|expired|revoked|unknown|your|my) ){0,4}(?i:api|access|secret|license|signing|auth)[ _-]?(?i:key))", "'{w16}' is not a valid API key", "'x' is not a valid key"),
    make_form("named after it", "password|token|secret|passphrase|credential", r"(?P<keep>)(?<=[\"'`])[^\s\"'`]{6,}(?=[\"'`][)\]}]? (?:is|was|isn't|wasn't) (?:(?:not|an?|no|the|invalid|valid|wrong|incorrect|expired|revoked|unknown|your|my|right|correct|access|api|auth|bearer) ){1,4}(?i:password|token|secret|passphrase|credential)\b)", "'{w16}' is not the password", "'x' is not a token"),
    make_form("named after it", "not in|unknown|none of", r"(?P<keep>)(?<=[\"'`])[^\s\"'`]{6,}(?=[\"'`] (?:is |was )?(?:not in|not one of|none of|not among) (?:the |any of )?(?:\w+[_. ])?(?:api[_ -]?keys|tokens|secrets|passwords|credentials)\b)", "KeyError: '{w16}' is not in api_keys", "'lm_head' is not in keys"),
    make_form("signing key", "signing|hmac|secret|private|encryption|master|state|carrier", r"(?P<keep>(?<![A-Za-z])(?i:signing|hmac|secret|private|encryption|master|state|carrier)(?![a-z])[\w \-]{0,24}[\"'`]?\s{0,2}(?:[:=]|\bis\b)?\s{0,2}[\"'`(]?)(?<![0-9a-fA-F])[0-9a-fA-F]{64,}", "wrong signing key {h64}", "ghost key 4dfb04f3173c1f2e4dfb04f3173c1f2e4dfb04f3173c1f2e4dfb04f3173c1f2e"),
)  # fmt: skip
