import pytest

from tasks.runs import masking

# Texts in which each secret is called planted, or begins so, and what is no secret is in a line with `shown`.
SECRETS = {
    "Python": """
        API_KEY = 'planted'
        login(password="planted", user="me")
        os.environ["SERVICE_TOKEN"] = "planted"
        os.environ.setdefault("SERVICE_TOKEN", "planted")
        password: str = "planted"
        TOKEN = (
            "planted"
        )
        SECRET = \\
            "planted"
        CERTIFICATE_PASSWORD = \"\"\"
        planted
        \"\"\"
        shown = 64
        PASSWORDS = {"db": "planted", "web": [
            "planted",
        ]}
        shown = 65
        credentials = dict(
            user="planted",
            key="planted(",
        )
        shown = 66
        tokens = ["planted",
                  "planted"]
        requests.get(shown, auth=("planted", "planted"))
        run(["--password", "planted"])
        shown = 67
    """,
    "JSON": """
        {"db_password": "planted",
         "shown": 1,
         "apiKeys": ["planted", "planted"],
         "api-keys": [
            "planted",
            "planted"
         ],
         "shown": 2,
         "tokens": {
            "ci": "planted",
            "other": {"x": "planted"}
         },
         "shown": 3,
         "private_key_id": "planted",
         "client_secret": "planted",
         "Authorization": "Bearer planted",
         "line": "shown"}
    """,
    "JSON in a notebook": r"""
        "password = \"planted\"\n",
        "shown = 1\n",
        "headers = {\"X-Api-Key\": \"planted\"}\n",
    """,
    "YAML": """
        api_keys: [planted, planted]
        api_keys: [
          planted,
          planted,
        ]
        shown: 1
        api_keys:
          [planted,
           planted]
        shown: 2
        passwords:
          - planted
          - planted

          - planted
        shown: 3
        passwords: # of all
        - planted
        - planted
        shown: 4
        - token: planted
          shown: 5
        - name: shown
          secrets:
            db: planted
            web: {user: planted, other: planted}
          units: shown
        private_key: |
          planted
            planted
        shown: 6
        password: >-
          planted
        password: "planted
          planted"
        shown: 7
        password: planted
          planted
        shown: 8
        tokens: [planted, planted]
        tokens: &all
        - planted
        shown: 9
        credentials: {user: planted,
          password: planted}
        shown: 10
    """,
    "Kubernetes": """
        env:
        - name: DB_PASSWORD
          value: planted
        - name: UNITS
          value: shown
        - {name: API_TOKEN, value: planted}
        STRIPE_KEY: planted
        STRIPE_KEYS:
          - planted
        shown: 1
    """,
    "TOML": """
        token = "planted"
        api_keys = [
            "planted",
            'planted',
        ]
        shown = 1
        notes = \"\"\"
        shown \"\"\"
        [secrets]
        openai = "planted"
        web = ["planted",
               "planted"]
        [model]
        units = "shown"
        [service.api_keys] # of all
        openai = "planted"
    """,
    "INI": """
        [default]
        aws_access_key_id = planted
        aws_secret_access_key=planted
        aws_session_token = planted
        passwords =
            planted
            planted
        shown = 1
        [web credentials]
        user: planted
        [other]
        shown: 2
    """,
    "environment": """
        export SECRET_TOKEN=planted
        STRIPE_KEY=planted
        AZURE_CLIENT_SECRET=planted
        AZURE_STORAGE_CONNECTION_STRING=DefaultEndpointsProtocol=https;AccountName=me;AccountKey=planted==;
        GOOGLE_APPLICATION_CREDENTIALS=/home/planted.json
        GITHUB_PAT=planted
        UNITS=shown
    """,
    "shell": """
        curl -H "Authorization: token planted" shown
        curl -u me:planted shown
        docker login --username shown --password planted
        machine shown login me password planted
        ENV API_TOKEN planted
        echo shown
    """,
    "addresses and others": """
        see?shown&sig=planted1&x=shown
        s3://shown?X-Amz-Credential=planted&X-Amz-Signature=planted
        Server=shown;Uid=me;Pwd=planted;
        send "Bearer planted1234"
        <db:password>planted</db:password>shown
        AccountKey=planted
    """,
}


@pytest.mark.parametrize("form", SECRETS)
@pytest.mark.parametrize("ending", ["\n", "\r\n"])
def test_secrets_of_each_form_are_masked(form, ending):
    text = SECRETS[form].replace("\n        ", "\n").strip("\n")
    lines = masking.masked_lines(text.replace("\n", ending))
    assert "planted" not in "\n".join(lines), lines
    assert len(lines) == len(text.split("\n"))
    expected = [line for line in text.split("\n") if "shown" in line and "planted" not in line]
    assert [line for line in lines if "shown" in line and masking.HIDDEN not in line] == [
        line + ending.removesuffix("\n") for line in expected
    ]


# As their services write them, in any line; put together here, so that nobody takes this file for one with secrets.
TOKENS = [
    "AKIA" + "ABCDEFGHIJKLMNOP",
    "ASIA" + "ABCDEFGHIJKLMNOP",
    "AIza" + "a1" * 17 + "b",
    "ghp_" + "a1" * 12,
    "github_pat_" + "a1" * 12,
    "glpat-" + "a1" * 10,
    "xoxb-" + "1" * 12,
    "sk-" + "Ab1" * 8,
    "hf_" + "ab" * 12,
    "npm_" + "a1" * 18,
    "pypi-" + "Ab1" * 10,
    "eyJ" + "ab" * 6 + ".eyJ" + "ab" * 6 + ".ab-_12",
    "https://hooks.slack.com/services/" + "T0/B0/" + "ab12" * 4,
]


@pytest.mark.parametrize("token", TOKENS)
def test_tokens_that_are_known_by_their_form_are_masked(token):
    assert masking.masked_lines(f"call('{token}', 1)") == ["call('***', 1)"]


def test_of_a_private_key_no_line_is_left():
    key = "-----BEGIN RSA " + "PRIVATE KEY-----\nMIIE\nabcd\n-----END RSA PRIVATE KEY-----"
    assert masking.masked_lines(f"a\n{key}\nb") == ["a", "***", "***", "***", "***", "b"]
    assert masking.masked_lines(key.rpartition("\n")[0]) == ["***"] * 3


@pytest.mark.parametrize(
    "line",
    [
        "tokenizer = build(tokens=5)", "units = 64", "tokens = tokenizer(text)", "num_tokens: int = 5", "author: me",
        'mask_token = "[MASK]"', "SORT_KEY = 'name'", "def token(self):", "class Token:", "keys: [a, b]",
        "import secrets", "Basic authentication", "key: abc", "google-auth==2.62.2 \\", "if valid(token): return",
    ],
)  # fmt: skip
def test_what_is_no_secret_stays(line):
    text = f"{line}\n    of it\n- one"
    assert masking.masked_lines(text) == text.split("\n")


def test_what_ends_before_its_bracket_or_quote_hides_no_more_than_itself():
    text = "PASSWORD=ab(cd\nunits: 1\npassword: it's\nunits: 2"
    assert masking.masked_lines(text) == ["PASSWORD=***", "units: 1", "password: ***", "units: 2"]
