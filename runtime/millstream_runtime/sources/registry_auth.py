"""Authentication to an image registry: anonymous, basic, or a bearer token.

    401 WWW-Authenticate: Bearer realm="https://auth…",service="…",scope="…"
        GET realm?service=…&scope=…   (with Basic where config.json has it)  ->  {"token": …}
    401 WWW-Authenticate: Basic …
        the name and password of config.json

A login goes to the registry's own host, to the token server that a well-known registry has elsewhere, and to hosts
that an administrator names (`allowed_hubs.py`): a challenge names any.

Names and passwords come from a file in the format of `~/.docker/config.json`, which is what an image pull Secret
(`kubernetes.io/dockerconfigjson`) holds. Credential helpers are programs and are not run.
"""

from __future__ import annotations

import base64
import binascii
import json
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlencode, urlsplit

from millstream_runtime.errors import FailureReason, InvalidConfigError, RuntimeFailure
from millstream_runtime.sources.addresses import NamedServer, origin
from millstream_runtime.sources.allowed_hubs import CHART_VALUE, VARIABLE, AllowedHubs, read_allowed_hubs
from millstream_runtime.sources.client import Auth, Client, NoAuth, RetryPolicy
from millstream_runtime.sources.image_reference import DOCKER_HUB, DOCKER_HUB_API

CONFIG_LIMIT_BYTES = 1 << 20
TOKEN_LIMIT_BYTES = 1 << 20
# Host of a registry (a pattern, of the whole name) and that of its token server, where it is another one.
TOKEN_SERVERS = (
    (re.escape(DOCKER_HUB_API), "auth.docker.io"),
    (r"registry\.gitlab\.com", "gitlab.com"),
    (r"registry\.digitalocean\.com", "api.digitalocean.com"),
    (r"rg\.[a-z0-9-]+\.scw\.cloud", "api.scaleway.com"),
    (r"lscr\.io", "ghcr.io"),
    (r"registry(?:-intl)?\.([a-z0-9-]+)\.aliyuncs\.com", r"dockerauth.\1.aliyuncs.com"),
)
_PARAMETER = re.compile(r'(\w+)="([^"]*)"')


@dataclass(frozen=True, slots=True)
class Login:
    """A name and a password, never shown."""

    username: str = field(repr=False)
    password: str = field(repr=False)

    @property
    def header(self) -> str:
        return "Basic " + base64.b64encode(f"{self.username}:{self.password}".encode()).decode()


class BasicAuth:
    """A login for the token server alone."""

    def __init__(self, login: Login, url: str) -> None:
        self._login = login
        self._origin = origin(url)

    def header(self, url: str) -> str | None:
        return self._login.header if origin(url) == self._origin else None

    def challenged(self, url: str, challenge: str) -> bool:
        return False


class RegistryAuth:
    """The Auth of one registry; its tokens never go to another origin, such as the CDN behind it."""

    def __init__(self, registry: NamedServer, repository: str, login: Login | None, policy: RetryPolicy | None) -> None:
        self._registry = registry
        self._origin = origin(registry.url)
        self._repository = repository
        self._login = login
        self._policy = policy
        self._header: str | None = None

    @property
    def has_login(self) -> bool:
        return self._login is not None

    def header(self, url: str) -> str | None:
        return self._header if origin(url) == self._origin else None

    def challenged(self, url: str, challenge: str) -> bool:
        """Answer a challenge of this registry; an expired token is replaced the same way."""
        if origin(url) != self._origin:
            return False
        scheme, _, rest = challenge.partition(" ")
        if scheme.lower() == "basic" and self._login is not None:
            fresh: str | None = self._login.header
        elif scheme.lower() == "bearer":
            fresh = self._exchange(dict(_PARAMETER.findall(rest)))
        else:
            return False
        self._header = fresh  # threads may race here: each token is valid
        return fresh is not None

    def _exchange(self, parameters: dict[str, str]) -> str | None:
        """A bearer token for pulling this repository. Raises TransferError; RuntimeFailure: a realm elsewhere."""
        realm = parameters.get("realm", "")
        try:
            scheme, host, _ = origin(realm)
        except ValueError:
            return None
        if scheme != "https" and not (
            scheme == self._origin[0] == "http"
        ):  # never send a login unencrypted because a challenge asks for it
            return None
        server = NamedServer(realm, f"the token server of {self._registry.name}")
        client = Client(server, self._login_for(host, realm), self._policy)
        scope = parameters.get("scope") or f"repository:{self._repository}:pull"
        query = urlencode({"service": parameters.get("service", ""), "scope": scope})
        url = f"{realm}{'&' if '?' in realm else '?'}{query}"
        body, _ = client.get(url, TOKEN_LIMIT_BYTES)
        try:
            answer = json.loads(body)
            token = answer.get("token") or answer.get("access_token")
        except (ValueError, AttributeError, RecursionError):
            return None
        good = isinstance(token, str) and token.isascii() and token.isprintable()
        return f"Bearer {token}" if good else None

    def _login_for(self, host: str, realm: str) -> Auth:
        """The login, where there is one, for a token server that may have it."""
        if self._login is None:
            return NoAuth()
        if not may_have_login(self._origin[1], host, read_allowed_hubs(os.environ)):
            raise RuntimeFailure(
                FailureReason.DOWNLOAD_UNAUTHORIZED,
                f"{self._registry.name} asks for its login at another host, and a login goes to a registry's own host "
                "or to a listed one alone. If the host in its WWW-Authenticate header is right, name it in the chart "
                f"value {CHART_VALUE} (${VARIABLE} of a command).",
            )
        return BasicAuth(self._login, realm)


def may_have_login(registry: str, token_server: str, allowed: AllowedHubs) -> bool:
    """Whether the login of a registry may go to a token server, both given by their hosts."""
    if token_server == registry or allowed.names_host(token_server):
        return True
    known = (re.fullmatch(pattern, registry) for pattern, _ in TOKEN_SERVERS)
    hosts = (match.expand(host) for match, (_, host) in zip(known, TOKEN_SERVERS, strict=True) if match is not None)
    return token_server in hosts


def read_login(path: Path, registry: str) -> Login | None:
    """The login for `registry` (as references name it) in a docker config.json; None where it has none.

    Raises:
        InvalidConfigError: the file cannot be read, or the entry is not one; neither is ever quoted.
    """
    try:
        with path.open("rb") as file:
            auths = json.loads(file.read(CONFIG_LIMIT_BYTES)).get("auths", {})
        entries = {_host(key): value for key, value in auths.items()}
    except OSError as error:
        raise InvalidConfigError(f"--docker-config {path} cannot be read: {error.strerror}.") from None
    except (ValueError, AttributeError, RecursionError):
        raise InvalidConfigError(f"--docker-config {path} is not a docker config.json.") from None
    entry = entries.get(registry)
    if not entry:
        return None
    login = _login_of(entry)
    if login is None:
        raise InvalidConfigError(
            f"--docker-config {path} has no usable login for {registry}: `auth`, or `username` and `password`."
        )
    return login


def _login_of(entry: Any) -> Login | None:
    if not isinstance(entry, dict):
        return None
    name, password = entry.get("username"), entry.get("password")
    if isinstance(name, str) and isinstance(password, str):
        return Login(name, password)
    try:
        name, colon, password = base64.b64decode(str(entry.get("auth", "")), validate=True).decode().partition(":")
    except (binascii.Error, UnicodeDecodeError):
        return None
    return Login(name, password.rstrip("\0")) if colon else None


def _host(key: str) -> str:
    """`https://index.docker.io/v1/` is how docker writes docker.io."""
    host = urlsplit(key if "//" in key else f"//{key}").netloc
    return DOCKER_HUB if host in ("index.docker.io", "registry-1.docker.io", DOCKER_HUB) else host
