"""Secrets made at run time, and the places in which they are met; harmless lines beside them."""

from __future__ import annotations

import base64
import json
import re
import shlex
import string
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import make_dataclass
from html import escape
from pathlib import Path
from random import Random
from urllib.parse import quote, quote_plus

from vllmops.redaction.secret_forms import FORMS

HARMLESS = (Path(__file__).with_name("logs") / "harmless.log").read_text().splitlines()

ALPHABETS = {
    "w": string.ascii_letters + string.digits,
    "l": string.ascii_lowercase + string.digits,
    "u": string.ascii_uppercase + string.digits,
    "d": string.digits,
    "h": "0123456789abcdef",
    "b": string.ascii_letters + string.digits + "+/",
}
# Names as people give them.
NAMES = """
API_KEY VLLM_API_KEY HF_TOKEN HUGGING_FACE_HUB_TOKEN OPENAI_API_KEY ANTHROPIC_API_KEY MYKEY NAME_PAT
GITHUB_PAT AZURE_DEVOPS_PAT db_pass DB_PASSWORD PGPASSWORD MYSQL_PWD REDIS_AUTH REDISCLI_AUTH
AWS_SECRET_ACCESS_KEY AWS_SESSION_TOKEN AZURE_CLIENT_SECRET AZURE_STORAGE_KEY WANDB_API_KEY
NGC_API_KEY LANGFUSE_SECRET_KEY DJANGO_SECRET_KEY JWT_SECRET ENCRYPTION_KEY SIGNING_KEY MASTER_KEY
SMTP_PASSWORD LDAP_BIND_PASSWORD DOCKER_PASSWORD NPM_TOKEN SLACK_WEBHOOK SENTRY_DSN COOKIE_SECRET
SESSION_SECRET VAULT_TOKEN KUBE_TOKEN RABBITMQ_DEFAULT_PASS ADMIN_PASS api_key apikey apiKey
api-key x-api-key client_secret clientSecret access_token accessToken refresh_token id_token
auth_token authToken secret secret_key secretKey secret_access_key private_key privateKey password
Password passwd pwd passphrase passcode user_password db_password dbPassword userPass credential
credentials bearer_token hf_token hub_token admin_token service_token csrf_token
session_token webhook_secret signing_secret encryption_key master_key shared_key account_key
AccountKey SharedAccessKey storage_key sas_token license_key ssh_key hmac_key
hashed_password password_hash basic_auth_password proxy_password keystore_password
truststorePassword spring.datasource.password ssl.key.password X-Auth-Token X-Vault-Token
X-Api-Token Ocp-Apim-Subscription-Key PRIVATE-TOKEN connection_string DATABASE_PASSWORD2
""".split()


def fill_example(example: str, random: Random) -> str:
    """An example of the table with random characters where it leaves a place for them."""

    def some(match: re.Match[str]) -> str:
        kind, count = match[1], int(match[2])
        while True:
            found = "".join(random.choices(ALPHABETS[kind], k=count))
            # As generators do: some of each.
            if count < 12 or kind in "dh" or any(x.isdigit() for x in found):
                return found

    return re.sub(r"\{([wludhb])(\d+)\}", some, example)


def values(random: Random) -> Iterator[str]:
    """What people and generators take for keys and passwords, for ever."""
    while True:
        yield fill_example("{w32}", random)
        yield fill_example("{h32}", random)
        yield fill_example("{w10}", random)
        yield fill_example("{l5}-{l5}-{l5}", random)
        yield fill_example("{b39}=", random)
        yield fill_example("{w6}!{w4}#{w3}", random)
        yield fill_example("Summer{d4}!", random)
        yield fill_example("{w4}$%{w5}^*", random)
        yield fill_example("{h64}", random)


def tokens(random: Random) -> dict[str, tuple[str, str]]:
    """By the form: an example, and what of it must not be seen."""
    found = {}
    for number, form in enumerate(FORMS):
        longest = max(re.findall(r"\{[wludhb](\d+)\}", form.goes), key=int, default="0")
        while True:
            text = fill_example(form.goes, random)
            hidden = max(re.findall(r"[A-Za-z0-9+]+", text), key=len)
            if len(hidden) >= min(int(longest), 8):
                break
        found[f"{form.name} {number}"] = (text, hidden)
    return found


def identifier(name: str) -> str:
    return re.sub(r"\W", "_", name)


def b64(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


# By name and value: where both stand.
NAMED: dict[str, Callable[[str, str], str]] = {
    "log line": lambda n, v: f"(APIServer pid=7) INFO 11-20 19:05:14 [x.py:1] using {n}={v}",
    "log line, colon": lambda n, v: f"(APIServer pid=7) INFO 11-20 19:05:14 [x.py:1] {n}: {v}",
    "argv": lambda n, v: f"vllm serve m --{n} {shlex.quote(v)} --port 8000",
    "argv, sign": lambda n, v: f"vllm serve m --{n}={v} --port 8000",
    "argv list": lambda n, v: repr(["vllm", "serve", f"--{n}", v, "--port", "8000"]),
    "environment": lambda n, v: f"{identifier(n)}={v}",
    "JSON": lambda n, v: json.dumps({"a": 1, n: v, "b": [2]}),
    "JSON, indented": lambda n, v: json.dumps({"a": 1, n: v, "b": [2]}, indent=2),
    "JSON, list": lambda n, v: json.dumps({n: [v, v[::-1]], "b": 1}, indent=2),
    "JSON in JSON": lambda n, v: json.dumps({"body": json.dumps({n: v, "b": 2}), "c": 3}),
    "JSON in JSON in JSON": lambda n, v: json.dumps([json.dumps({"x": json.dumps({n: v})})]),
    "YAML": lambda n, v: f"a: 1\n{n}: {v}\nb: 2",
    "YAML, quoted": lambda n, v: f"a: 1\n  {n}: '{v}'\nb: 2",
    "YAML block": lambda n, v: f"a: 1\n{n}: |\n  {v}\nb: 2",
    "YAML, commented": lambda n, v: f"- name: {n}\n  # a comment\n  value: {v}",
    "YAML, of a vault": lambda n, v: f"{n}: !vault |\n  {v}\nb: 2",
    "TOML, in one line": lambda n, v: f'[x]\n{n} = """{v}"""',
    "next line": lambda n, v: f"args:\n- --{n}\n- {v!r}\n- --port",
    "next line, shell": lambda n, v: f"vllm serve m --{n} \\\n  {shlex.quote(v)} \\\n  --port 1",
    "YAML list": lambda n, v: f"a: 1\n{n}:\n  - {v}\nb: 2",
    "TOML": lambda n, v: f'[x]\n{n} = "{v}"\ny = 1',
    "TOML, long": lambda n, v: f'[x]\n{n} = """\n{v}\n"""\ny = 1',
    "INI": lambda n, v: f"[x]\n{n} = {v}\ny = 1",
    "URL query": lambda n, v: f"GET http://h/v1?a=1&{n}={quote(v, safe='')}&b=2 HTTP/1.1",
    "URL query, coded": lambda n, v: (
        f"GET /login?next={quote(f'/x?{n}={v}&b=2', safe='')} HTTP/1.1"
    ),
    "URL fragment": lambda n, v: f"http://h/ui#{n}={quote(v, safe='')}&b=2",
    "header": lambda n, v: f"< {n}: {v}",
    "header dict": lambda n, v: repr({"host": "h", n.lower(): v}),
    "header pairs": lambda n, v: repr([(b"host", b"h"), (n.lower().encode(), v.encode())]),
    "curl -H": lambda n, v: f"curl -H '{n}: {v}' http://h/v1/models",
    "traceback": lambda n, v: (
        "Traceback (most recent call last):\n"
        f'  File "/srv/a.py", line 3, in f\n    connect({identifier(n)}="{v}")\n'
        f"ValueError: wrong {n}: {v}"
    ),
    "namespace": lambda n, v: repr(Namespace(a=1, **{identifier(n): v}, port=8000)),
    "dataclass": lambda n, v: repr(make_dataclass("Config", ["a", identifier(n)])(1, v)),
    "dict": lambda n, v: repr({"a": None, n: v, "b": True}),
    "export": lambda n, v: f"export {identifier(n)}={shlex.quote(v)}",
    "Dockerfile ENV": lambda n, v: f"FROM x\nENV {identifier(n)}={v}\nRUN y",
    "Dockerfile ENV, space": lambda n, v: f"FROM x\nENV {identifier(n)} {v}\nRUN y",
    "docker -e": lambda n, v: f"docker run -e {identifier(n)}={shlex.quote(v)} -p 8000:8000 vllm",
    "compose": lambda n, v: f"environment:\n  - {identifier(n)}={v}\n  - B=2",
    "Kubernetes env": lambda n, v: f"env:\n- name: {n}\n  value: {v}\n- name: B\n  value: x",
    "Kubernetes env, value first": lambda n, v: f"env:\n- value: {v}\n  name: {n}\n- name: B",
    "JSON, value first": lambda n, v: json.dumps([{"value": v, "name": n}], indent=2),
    "YAML, described": lambda n, v: (
        f"- name: {n}\n  type: string\n  description: for the gateway\n  sensitive: true\n"
        f"  scope: all\n  value: {v}"
    ),
    "list of fields": lambda n, v: f"Name                 : {n}\nValue                : {v}",
    "table of names": lambda n, v: f"NAME    VALUE\nREPLICAS    3\n{n}    {v}",
    "table of names, tabs": lambda n, v: f"KEY\tVALUE\n{n}\t{v}",
    "row of a database": lambda n, v: f"*** 1. row ***\n  name: {n}\n value: {v}",
    "JSON, described": lambda n, v: json.dumps(
        {"Key": n, "Type": "x", "Version": 3, "Tier": "y", "Value": v}, indent=2
    ),
    "JSON, nested": lambda n, v: json.dumps({"id": n, "attributes": {"content": v}}, indent=2),
    "LDIF": lambda n, v: f"userPassword:: {b64(v)}\n# {n}",
    "reported type": lambda n, v: f'array(1) {{\n  ["{n}"]=>\n  string({len(v)}) "{v}"\n}}',
    "XML, elements": lambda n, v: f"<name>{n}</name>\n<value>{escape(v)}</value>",
    "XML, value first": lambda n, v: f"<value>{escape(v)}</value>\n<name>{n}</name>",
    "XML, attributes": lambda n, v: f'<add value="{escape(v)}" key="{n}"/>',
    "XML, property list": lambda n, v: f"<key>{n}</key>\n<string>{escape(v)}</string>",
    "HTML": lambda n, v: f"{n}&#61;{escape(v)}",
    "HTML, hex": lambda n, v: f"{n}&#x3d;&quot;{escape(v)}&quot;",
    "form": lambda n, v: f"q={n}+%3D+{quote_plus(v)}&b=2",
    "JSON, escaped": lambda n, v: f'{{"query": "a\\u0026{n}\\u003d{v}\\u0026b=2"}}',
    "shell": lambda n, v: f"$ echo ${identifier(n)}\n{v}",
    "Terraform": lambda n, v: f'variable "{n}" {{\n  default = "{v}"\n}}',
    "Kubernetes env, JSON": lambda n, v: json.dumps({"env": [{"name": n, "value": v}]}),
    "Kubernetes secret": lambda n, v: f"apiVersion: v1\ndata:\n  {n}: {b64(v)}\nkind: Secret",
    "XML": lambda n, v: f"<a>1</a><{n}>{v.replace('<', '')}</{n}>",
    "connection string": lambda n, v: f"Server=h;Database=d;{n}={v};Timeout=3",
    "table": lambda n, v: f"| {n} | {v} |",
    "assignment": lambda n, v: f"os.environ['{n}'] = '{v}'",
    "properties": lambda n, v: f"{n}={v}",
    "arrow": lambda n, v: f'"{n}" => "{v}"',
}
# By the value alone, whose form tells it.
ALONE: dict[str, Callable[[str], str]] = {
    "log line": lambda v: f"(APIServer pid=7) INFO 11-20 19:05:14 [x.py:1] trying {v} now",
    "end of line": lambda v: f"ValueError: refused: {v}",
    "quoted": lambda v: f"ValueError: '{v}' was refused",
    "JSON": lambda v: json.dumps({"x": v}),
    "JSON in JSON": lambda v: json.dumps({"body": json.dumps({"x": v})}),
    "list": lambda v: repr(["a", v, "b"]),
    "argument": lambda v: f"f(x={v!r}, y=1)",
    "command line": lambda v: f"run --x '{v}' --y",
    "parentheses": lambda v: f"failed ({v})",
    "YAML": lambda v: f"x: {v}",
    "base64": lambda v: f"x: {b64(f'hello: {v} world')} y",
}
# By the value alone, which stands in a sentence.
SENTENCES = r"""
auth token for project alpha = ¤
audit: token owner=alpha scope=read material ¤
10:00:01.123 [main] DEBUG c.e.AuthFilter - Credential presented by svc-a was ¤
I1122 10:00:00.123456 1 auth.go:99] "Using static token" user="bob" value="¤"
INSERT INTO api_tokens (id, name, value) VALUES (1, 'ci', '¤');
ldap3: bind DN cn=a password length 20 text ¤
RequestHeader set Authorization "Custom ¤"
{"event":"login_failed","attempt":{"password":{"sent":"¤"}}}
my pw was ¤ but I changed it, can you delete it from the log
das Passwort für den Dienst lautet ¤
パスワード: ¤
api_key[openai]=¤
Invalid token '¤'
Invalid token: ¤
invalid API key: ¤
API key '¤' is not valid
API key ¤ is not valid
Incorrect API key provided: ¤
Incorrect API key provided: ¤.
The api key "¤" has expired
can't log in as bob with password "¤"
can't log in as bob with password '¤'
using password ¤
password is ¤
the password is '¤'
password: ¤
Password for bob: ¤
Secret Access Key: ¤
Access token = ¤
access token ¤ has expired
the secret `¤` was refused
wrong passphrase "¤"
'¤' is not a valid API key
"¤" is not the password
'¤' is no valid token
authenticating with token ¤
auth token (¤) rejected
bearer token ¤ is invalid
Bearer ¤
Authorization: Bearer ¤
authorization: Token ¤
Proxy-Authorization: Basic ¤
Cookie: a=¤; b=2
Set-Cookie: session=¤; Path=/
curl -u bob:¤ http://h/v1
curl --user "bob:¤" http://h/v1
machine h login bob password ¤
  password ¤
db:5432:app:bob:¤
postgresql://bob:¤@db:5432/app
redis://:¤@cache:6379/0
mongodb+srv://bob:¤@db/app?w=1
https://¤@git.local/x.git
https://bob:¤@git.local/x.git
amqp://bob:¤@mq//
sshpass -p ¤ ssh h
docker login -u bob -p ¤ registry
redis-cli -a ¤ ping
mysql -ubob -p¤ app
https://hooks.slack.com/services/T0/B0/¤
https://discord.com/api/webhooks/1234/¤
https://x.webhook.office.com/webhookb2/a@b/IncomingWebhook/¤/y
https://mattermost.local/hooks/¤
https://h/callback?code=¤&state=1
https://h/ui#access_token=¤
s3://b/k?X-Amz-Credential=¤&X-Amz-Signature=¤
https://b.blob.core.windows.net/c?sv=1&sig=¤
{"auths": {"r": {"auth": "¤"}}}
kubectl create secret generic a --from-literal=password=¤
host=db user=bob password=¤ dbname=app
host=db user=bob password='¤' dbname=app
Authorization: ApiKey ¤
authorization=Bearer ¤
{"Authorization": "Bearer ¤"}
headers={'Authorization': 'Bearer ¤', 'Accept': '*/*'}
'X-API-KEY': '¤'
b'authorization': b'Bearer ¤'
HTTP_AUTHORIZATION=Bearer ¤
HTTP_X_API_KEY=¤
Config(host='h', password='¤', port=5432)
Settings(api_key=SecretStr('¤'))
<Config api_key=¤ host=h>
api_key → ¤
api-key:¤
--api-key=¤
--api-key "¤"
-e HF_TOKEN=¤
docker run -e HF_TOKEN="¤" -e X=1 img
docker run --env HF_TOKEN='¤' img
docker build --build-arg HF_TOKEN=¤ .
HF_TOKEN="¤" vllm serve m
env HF_TOKEN=¤ VLLM_API_KEY=¤ vllm serve m
export HF_TOKEN='¤'
setenv HF_TOKEN ¤
set HF_TOKEN=¤
$env:HF_TOKEN = "¤"
Environment="HF_TOKEN=¤"
Environment=HF_TOKEN=¤
password=¤;
pass: ¤
db_pass=¤
MYKEY=¤
NAME_PAT=¤
x_pat: ¤
?key=¤
GET /v1/models?key=¤&alt=json
GET /x?access_token=¤
GET /x?token=¤ HTTP/1.1
GET /x?api_key%3D¤ HTTP/1.1
api_key%3D¤
api_key%253D¤
%22api_key%22%3A%22¤%22
"{\"api_key\": \"¤\"}"
{"args": "{\"password\": \"¤\"}"}
{'body': '{"password": "¤"}'}
&quot;password&quot;: &quot;¤&quot;
<password>¤</password>
<add key="ApiKey" value="¤"/>
<property name="password" value="¤"/>
<Password xsi:type="string">¤</Password>
invalid api key: "¤"
The API key ¤ is not valid.
You provided API key ¤, which is invalid
user bob with password "¤" was refused
logging in with user bob, password ¤
AWS Secret Access Key [None]: ¤
Token: ¤
token=¤
auth=('bob', '¤')
auth=("bob", "¤")
login(user='bob', password='¤')
connect('postgresql://bob:¤@db/x')
psycopg2.connect("dbname=x user=bob password=¤ host=h")
jdbc:postgresql://h/db?user=bob&password=¤
jdbc:mysql://bob:¤@h:3306/db
Server=h;Uid=bob;Pwd=¤;
DefaultEndpointsProtocol=https;AccountName=a;AccountKey=¤;EndpointSuffix=x
Endpoint=sb://x/;SharedAccessKeyName=n;SharedAccessKey=¤
h:5432:db:bob:¤
*:*:*:bob:¤
//registry.npmjs.org/:_authToken=¤
_auth=¤
_password=¤
{"auths": {"https://index.docker.io/v1/": {"auth": "¤"}}}
git clone https://oauth2:¤@gitlab.com/x.git
git clone https://x-access-token:¤@github.com/x.git
curl -u bob:¤ https://h
curl --user bob:'¤' https://h
curl -ubob:¤ https://h
curl -H "X-Api-Key: ¤" https://h
curl -H "PRIVATE-TOKEN: ¤" https://h
wget --password=¤ https://h
wget --http-password ¤  https://h
mysql -u bob -p¤ db
psql "password=¤"
PGPASSWORD=¤ psql
sshpass -p '¤' ssh h
echo '¤' | docker login --password-stdin
docker login -u u -p ¤ reg
helm registry login -p ¤ x
vault login ¤
openssl enc -k ¤ -in x
Cookie: session=¤
Set-Cookie: sid=¤; HttpOnly
cookies: {'sessionid': '¤'}
csrftoken=¤
JSESSIONID=¤
api_keys: ['¤', '¤']
"api_keys": ["¤", "¤"]
api_keys=["¤"]
client_secret=¤&grant_type=x
grant_type=password&username=u&password=¤
refresh_token=¤
{"access_token":"¤","token_type":"bearer"}
{"id_token":"¤"}
os.environ["HF_TOKEN"]="¤"
os.environ['HF_TOKEN'] = '¤'
os.environ.setdefault("HF_TOKEN", "¤")
os.environ.get("HF_TOKEN", "¤")
environ({'HF_TOKEN': '¤', 'HOME': '/root'})
HF_TOKEN: "¤"
ENV HF_TOKEN ¤
ENV HF_TOKEN=¤
ARG HF_TOKEN=¤
hf auth login --token ¤
huggingface-cli login --token ¤
wandb login ¤
login(token="¤")
HfApi(token='¤')
snapshot_download('x', token='¤')
self.token = '¤'
    api_key = "¤"
    client = OpenAI(api_key="¤")
PermissionError: token ¤ rejected
requests.exceptions.HTTPError: 401 Client Error: Unauthorized for url: https://h/x?api_key=¤
auth token for project alpha = ¤
the API key of the staging cluster is ¤
password for db user svc on host a: ¤
secret in vault path kv/x = ¤
The secret you asked for: ¤
Passwort: ¤
mot de passe : ¤
contraseña: ¤
密码: ¤
пароль = ¤
api_tokens[eu]=¤
curl -H 'X-Custom-Key: ¤' h
key material: ¤
vault kv put secret/x value=¤
asyncpg.exceptions.InvalidPasswordError: password "¤" failed for user "bob"
private_key: ¤
signing-key: ¤
jwt_secret=¤
SECRET_KEY='¤'
secret: ¤
webhook_url=https://hooks.slack.com/services/T1/B1/¤
"webhook": "https://example.com/notify/¤"
--webhook https://example.com/notify/¤
watch --webhook=https://example.com/n?x=¤
https://discordapp.com/api/webhooks/1/¤
https://outlook.office.com/webhook/¤
https://api.telegram.org/bot123456789:¤/sendMessage
https://hooks.zapier.com/hooks/catch/1/¤
https://open.feishu.cn/open-apis/bot/v2/hook/¤
https://chat.googleapis.com/v1/spaces/A/messages?key=¤&token=¤
https://events.pagerduty.com/integration/¤/enqueue
https://u:¤@sentry.io/1
https://¤@o1.ingest.sentry.io/1
SENTRY_DSN=https://¤@o1.ingest.sentry.io/1
AZURE_SAS=?sv=2020&sig=¤
smtp://bob:¤@mail:587
ldap bind password: ¤
passphrase for key: ¤
Enter passphrase: ¤
OTP: ¤
credentials: ¤
credential=¤
{"credentials": {"user": "u", "password": "¤"}}
'credentials': ('u', '¤')
user:pass=bob:¤
username=bob password=¤
kubectl create secret generic x --from-literal=key=¤
kubectl create secret docker-registry x --docker-password=¤
X-Vault-Token: ¤
X-Amz-Security-Token: ¤
x-goog-api-key: ¤
Ocp-Apim-Subscription-Key: ¤
api_key is ¤
secret "¤" is wrong
my password is ¤
pwd=¤
Passwd:¤
"passwd":"¤"
apikey ¤
OPENAI_KEY=¤
openai.api_key = "¤"
openai.api_key='¤'
'secret_access_key': '¤'
aws_secret_access_key = ¤
aws_session_token=¤
AWS4-HMAC-SHA256 Credential=AKIA/x, Signature=¤
MINIO_ROOT_PASSWORD=¤
ADMIN_TOKEN=¤
vllm_api_key: ¤
│ api_key │ ¤ │
vllm serve m --api-key ¤ ¤-2 --port 8000
['vllm', 'serve', 'm', '--api-key', '¤', '¤-2', '--port', '8000']
non-default args: {'model_tag': 'm', 'api_key': ['¤', '¤-2'], 'port': 8000}
Namespace(model='m', api_key=['¤', '¤-2'], port=8000)
pin=¤
pin=73519402
community string ¤
SNMP community string: "¤"
("u", "¤") is the password
invalid username-password pair: u/¤
tokens = ("¤", "¤-2")
api_keys: [¤, ¤-2]
valid api keys: ¤, ¤-2
Access Key ID: ¤
<AccessKeyId>¤</AccessKeyId>
"private_key_id": "¤"
OTEL_EXPORTER_OTLP_HEADERS="x-team=¤"
aws configure set aws_secret_access_key ¤
login failed for bob:¤
AuthError: credentials bob:¤ were refused
token mismatch: ¤ != ¤-2
API key created: ¤
secret too short: '¤'
TypeError: password must be str, not ¤
HF_TOKEN is ¤
password <- "¤"
api_key: str = "¤"
token: !!str ¤
default: &hf_token ¤
a1="--api-key" a2="¤"
api_key [¤] rejected
unseal key 1: ¤
AuthConfig(users={'bob': '¤'})
basic_auth_users={'bob': '¤', 'eve': '¤'}
conda config --add channels https://h/t/¤/main
decrypt with key ¤
s3fs.S3FileSystem(key='¤', secret='¤')
##[debug]Evaluating: secrets.HF_TOKEN = '¤'
rabbitmqctl change_password svc '¤'
POETRY_PYPI_TOKEN_PRIVATE=¤
curl -b 'sid=¤; a=b' http://h
go: cfg.Token = "¤"
go: Token:(string) (len=32) "¤"
<string name="api_token">¤</string>
<input type="password" value="¤">
{"k":"api_key","v":"¤"}
psk=¤
WEBHOOK_URL=¤
api_key     ¤
""".strip("\n").splitlines()


def pem(random: Random, kind: str) -> tuple[str, list[str]]:
    """A private key in lines, and those that must not be seen."""
    body = [fill_example("{b64}", random) for _ in range(5)]
    return f"-----BEGIN {kind}PRIVATE KEY-----\n" + "\n".join(
        body
    ) + f"\n-----END {kind}PRIVATE KEY-----", body
