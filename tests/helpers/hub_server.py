"""A Hub on loopback: the part of its HTTP interface that huggingface_hub uses to push and to load models.

It keeps real bytes, takes every file with the commit (large ones go other ways on the Hub, which is huggingface_hub's
matter), and can break the connection before a commit is made.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit


@dataclass
class Repo:
    """A repository: its commits, oldest first."""

    private: bool
    commits: list[tuple[str, dict[str, bytes]]] = field(default_factory=list)

    def __post_init__(self):
        self.commit({".gitattributes": b"*.safetensors filter=lfs\n"})

    @property
    def sha(self):
        return self.commits[-1][0]

    @property
    def files(self):
        return self.commits[-1][1]

    def commit(self, files):
        listing = json.dumps([len(self.commits), {path: git_hash(content) for path, content in files.items()}])
        self.commits.append((hashlib.sha1(listing.encode()).hexdigest(), files))

    def at(self, revision):
        if revision == "main":
            return self.commits[-1]
        return next((commit for commit in self.commits if commit[0] == revision), None)


class Refused(Exception):
    """An answer that is not the wanted one."""

    def __init__(self, status, message, code=""):
        super().__init__(message)
        self.status, self.message, self.code = status, message, code


class Hub(ThreadingHTTPServer):
    """The server and everything it holds.

    Attributes:
        users: token -> name; a user writes under the own name only.
        repos: what it holds.
        broken_commits: how many more times the connection breaks before a commit is made.
    """

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.users = {"hf_me": "me", "hf_other": "other"}
        self.repos = {}
        self.broken_commits = 0

    @property
    def endpoint(self):
        return f"http://127.0.0.1:{self.server_port}"

    def text(self, repo, path):
        """A file of a repository's last commit."""
        return self.repos[repo].files[path].decode()


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    server: Hub
    protocol_version = "HTTP/1.1"
    ROUTES = (
        ("GET", r"/api/whoami-v2", "whoami"),
        ("POST", r"/api/repos/create", "create"),
        ("POST", r"/api/validate-yaml", "validate"),
        ("POST", r"/api/models/(?P<repo>[^/]+/[^/]+)/preupload/(?P<revision>[^/]+)", "preupload"),
        ("POST", r"/api/models/(?P<repo>[^/]+/[^/]+)/commit/(?P<revision>[^/]+)", "commit"),
        ("GET", r"/api/models/(?P<repo>[^/]+/[^/]+)/tree/(?P<revision>[^/]+)(/(?P<path>.+))?", "tree"),
        ("GET", r"/api/models/(?P<repo>[^/]+/[^/]+)(/revision/(?P<revision>[^/]+))?", "info"),
        ("GET", r"/(?P<repo>[^/]+/[^/]+)/resolve/(?P<revision>[^/]+)/(?P<path>.+)", "resolve"),
    )

    def handle_one_request(self):
        try:
            super().handle_one_request()
        except ConnectionError:
            self.close_connection = True

    def log_message(self, *args):
        pass

    def do(self):
        path = unquote(urlsplit(self.path).path)
        method = "GET" if self.command == "HEAD" else self.command
        try:
            for verb, pattern, name in self.ROUTES:
                match = re.fullmatch(pattern, path)
                if match and verb == method:
                    found = {key: value for key, value in match.groupdict().items() if value is not None}
                    getattr(self, name)(**found)
                    return
            raise Refused(404, f"Not found: {method} {path}")
        except Refused as refused:
            headers = {"X-Error-Message": refused.message, **({"X-Error-Code": refused.code} if refused.code else {})}
            self.answer({"error": refused.message}, refused.status, headers)

    do_GET = do_HEAD = do_POST = do

    # Reading and answering

    def body(self):
        if self.headers.get("Transfer-Encoding", "").lower() == "chunked":
            parts = []
            while size := int(self.rfile.readline(), 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def answer(self, content, status=200, headers=None):
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def user(self):
        """Who asks; None for anybody."""
        kind, _, token = self.headers.get("Authorization", "").partition(" ")
        if not kind:
            return None
        if token not in self.server.users:
            raise Refused(401, "Invalid credentials in Authorization header")
        return self.server.users[token]

    def repo(self, name, write=False):
        user, repo = self.user(), self.server.repos.get(name)
        if repo is None or (repo.private and user != name.split("/")[0]):
            raise Refused(401 if user is None else 404, "Repository not found", "RepoNotFound")
        if write and user != name.split("/")[0]:
            raise Refused(401 if user is None else 403, "You don't have the rights to write here")
        return repo

    def at(self, repo, revision):
        commit = self.repo(repo).at(revision)
        if commit is None:
            raise Refused(404, "Invalid rev id", "RevisionNotFound")
        return commit

    # Repositories

    def whoami(self):
        user = self.user()
        if user is None:
            raise Refused(401, "Invalid username or password.")
        self.answer({"type": "user", "name": user, "orgs": []})

    def create(self):
        wanted, user = json.loads(self.body()), self.user()
        if user is None:
            raise Refused(401, "Invalid username or password.")
        owner = wanted["organization"] or user
        if owner != user:
            raise Refused(403, f"You don't have the rights to create a model under the namespace {owner}")
        name = f"{owner}/{wanted['name']}"
        status = 409 if name in self.server.repos else 200
        if status == 200:
            self.server.repos[name] = Repo(wanted.get("visibility") == "private")
        self.answer({"url": f"{self.server.endpoint}/{name}"}, status)

    def validate(self):
        content = json.loads(self.body())["content"]
        errors = [] if content.startswith("---\n") else [{"message": "no metadata"}]
        self.answer({"errors": errors, "warnings": []}, 400 if errors else 200)

    def info(self, repo, revision="main"):
        sha, files = self.at(repo, revision)
        siblings = [{"rfilename": path} for path in files]
        held = self.repo(repo)
        self.answer(
            {"id": repo, "modelId": repo, "sha": sha, "private": held.private, "tags": [], "siblings": siblings}
        )

    def tree(self, repo, revision, path=""):
        _, files = self.at(repo, revision)
        inside = {name: file for name, file in files.items() if not path or name.startswith(path + "/")}
        if path and not inside:
            raise Refused(404, f"{path} does not exist", "EntryNotFound")
        described = {name: {"size": len(content), "oid": git_hash(content)} for name, content in inside.items()}
        self.answer([{"type": "file", "path": name, **facts} for name, facts in described.items()])

    # Pushing

    def preupload(self, repo, revision):
        files = self.repo(repo, write=True).files
        paths = [asked["path"] for asked in json.loads(self.body())["files"]]
        known = {"uploadMode": "regular", "shouldIgnore": False}
        answers = [{"path": path, "oid": git_hash(files[path]) if path in files else None, **known} for path in paths]
        self.answer({"files": answers, "commitOid": self.repo(repo).sha})

    def commit(self, repo, revision):
        held = self.repo(repo, write=True)
        header, *operations = [json.loads(line) for line in self.body().splitlines()]
        assert header["key"] == "header" and header["value"]["summary"]
        if self.server.broken_commits:
            self.server.broken_commits -= 1
            self.connection.shutdown(2)
            raise ConnectionAbortedError
        files = dict(held.files)
        for operation in operations:
            value = operation["value"]
            if operation["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif operation["key"] == "deletedFile":
                del files[value["path"]]
            else:
                raise Refused(400, f"Unknown operation {operation['key']}")
        held.commit(files)
        url = f"{self.server.endpoint}/{repo}/commit/{held.sha}"
        self.answer({"success": True, "commitOid": held.sha, "commitUrl": url, "hookOutput": ""})

    # Loading

    def resolve(self, repo, revision, path):
        sha, files = self.at(repo, revision)
        if path not in files:
            raise Refused(404, f"{path} does not exist", "EntryNotFound")
        self.answer(files[path], headers={"X-Repo-Commit": sha, "ETag": f'"{git_hash(files[path])}"'})


def git_hash(content):
    """The hash by which git knows a file."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def running_hub():
    """A Hub that answers until the test ends; a fixture."""
    hub = Hub()
    thread = threading.Thread(target=hub.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    yield hub
    hub.shutdown()
    thread.join()
    hub.server_close()
