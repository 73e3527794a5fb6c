"""A Hub on loopback: the part of its HTTP interface that huggingface_hub uses to push and to load models.

It keeps real bytes, checks every sha256, and can break the connection at a named place. Large files have an address of
another host name, as on the Hub, so that clients follow the redirect without the token.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

LARGE = re.compile(r".*\.(safetensors|bin|png)")  # kept as LFS objects


@dataclass
class File:
    """A file of a commit: its content, or the sha256 of a large object."""

    content: bytes | None
    sha256: str | None = None


@dataclass
class Repo:
    """A repository: its commits, oldest first."""

    private: bool
    commits: list[tuple[str, dict[str, File]]] = field(default_factory=list)

    def __post_init__(self):
        self.commit({".gitattributes": File(b"*.safetensors filter=lfs\n")})

    @property
    def sha(self):
        return self.commits[-1][0]

    @property
    def files(self):
        return self.commits[-1][1]

    def commit(self, files):
        listing = json.dumps([len(self.commits), {path: str(file) for path, file in files.items()}])
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
        repos, objects: what it holds; objects by their sha256.
        cuts: place -> how many more times the connection breaks there: "commit", before a commit is made.
        seen: how often each place was reached.
    """

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.users = {"hf_me": "me", "hf_other": "other"}
        self.repos = {}
        self.objects = {}
        self.cuts = Counter()
        self.seen = Counter()
        self.lock = threading.Lock()

    @property
    def endpoint(self):
        return f"http://127.0.0.1:{self.server_port}"

    @property
    def storage(self):
        return f"http://localhost:{self.server_port}/storage"

    def text(self, repo, path):
        """A small file of a repository's last commit."""
        content = self.repos[repo].files[path].content
        assert content is not None
        return content.decode()


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
        ("POST", r"/(?P<repo>[^/]+/[^/]+)\.git/info/lfs/objects/batch", "batch"),
        ("PUT", r"/storage/(?P<sha256>\w+)", "upload"),
        ("GET", r"/storage/(?P<sha256>\w+)", "download"),
        ("POST", r"/storage/verify", "verify"),
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
                    with self.server.lock:
                        self.server.seen[name] += 1
                    found = {key: value for key, value in match.groupdict().items() if value is not None}
                    getattr(self, name)(**found)
                    return
            raise Refused(404, f"Not found: {method} {path}")
        except Refused as refused:
            headers = {"X-Error-Message": refused.message, **({"X-Error-Code": refused.code} if refused.code else {})}
            self.answer({"error": refused.message}, refused.status, headers)

    do_GET = do_HEAD = do_POST = do_PUT = do

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

    def cut(self, place):
        """Break the connection if that was asked for."""
        with self.server.lock:
            if self.server.cuts[place] == 0:
                return
            self.server.cuts[place] -= 1
        self.connection.shutdown(2)
        self.close_connection = True
        raise ConnectionAbortedError(place)

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

    def size(self, file):
        return len(file.content if file.content is not None else self.server.objects[str(file.sha256)])

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
        entries = []
        for name, file in inside.items():
            entry = {"type": "file", "path": name, "size": self.size(file), "oid": git_hash(file)}
            if file.sha256:
                entry["lfs"] = {"oid": file.sha256, "size": self.size(file), "pointerSize": 134}
            entries.append(entry)
        self.answer(entries)

    # Pushing

    def preupload(self, repo, revision):
        files = self.repo(repo, write=True).files
        answers = []
        for asked in json.loads(self.body())["files"]:
            there = files.get(asked["path"])
            mode = "lfs" if LARGE.fullmatch(asked["path"]) else "regular"
            oid = None if there is None else there.sha256 or git_hash(there)
            answers.append({"path": asked["path"], "uploadMode": mode, "shouldIgnore": False, "oid": oid})
        self.answer({"files": answers, "commitOid": self.repo(repo).sha})

    def batch(self, repo):
        self.repo(repo, write=True)
        objects = []
        for wanted in json.loads(self.body())["objects"]:
            actions = {
                "upload": {"href": f"{self.server.storage}/{wanted['oid']}", "header": {}},
                "verify": {"href": f"{self.server.endpoint}/storage/verify", "header": {}},
            }
            objects.append({**wanted, **({} if wanted["oid"] in self.server.objects else {"actions": actions})})
        self.answer({"transfer": "basic", "objects": objects})

    def upload(self, sha256):
        content = self.body()
        if hashlib.sha256(content).hexdigest() != sha256:
            raise Refused(400, "The content has another sha256")
        self.server.objects[sha256] = content
        self.answer(b"")

    def verify(self):
        self.user()
        wanted = json.loads(self.body())
        if len(self.server.objects.get(wanted["oid"], b"")) != wanted["size"]:
            raise Refused(404, "Not uploaded")
        self.answer({})

    def commit(self, repo, revision):
        held = self.repo(repo, write=True)
        header, *operations = [json.loads(line) for line in self.body().splitlines()]
        assert header["key"] == "header" and header["value"]["summary"]
        self.cut("commit")
        files = dict(held.files)
        for operation in operations:
            value = operation["value"]
            if operation["key"] == "file":
                files[value["path"]] = File(base64.b64decode(value["content"]))
            elif operation["key"] == "lfsFile":
                if len(self.server.objects.get(value["oid"], b"")) != value["size"]:
                    raise Refused(400, f"{value['path']} points to an object that was not uploaded")
                files[value["path"]] = File(None, value["oid"])
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
        file, headers = files[path], {"X-Repo-Commit": sha}
        if file.content is not None:
            self.answer(file.content, headers={**headers, "ETag": f'"{git_hash(file)}"'})
            return
        linked = {"X-Linked-ETag": f'"{file.sha256}"', "X-Linked-Size": str(self.size(file))}
        self.answer(b"", 302, {**headers, **linked, "Location": f"{self.server.storage}/{file.sha256}"})

    def download(self, sha256):
        if "Authorization" in self.headers:
            raise Refused(400, "The token must not leave the Hub")
        if sha256 not in self.server.objects:
            raise Refused(404, "No such object")
        content, status, headers = self.server.objects[sha256], 200, {"ETag": f'"{sha256}"'}
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if wanted:
            start, end = int(wanted[1]), int(wanted[2] or len(content) - 1)
            headers["Content-Range"] = f"bytes {start}-{end}/{len(content)}"
            content, status = content[start : end + 1], 206
        self.answer(content, status, headers)


def git_hash(file):
    """The hash by which git knows a file, or the pointer to a large one."""
    content = file.content if file.content is not None else str(file.sha256).encode()
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


@contextmanager
def running_hub():
    """A Hub that answers until the block ends."""
    hub = Hub()
    thread = threading.Thread(target=hub.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield hub
    finally:
        hub.shutdown()
        thread.join()
        hub.server_close()
