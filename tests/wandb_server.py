"""As much of a W&B server as a run needs to start, to log and to end; it can fail on request."""

import contextlib
import http.server
import json
import re
import threading
from collections.abc import Iterator


class Server(http.server.ThreadingHTTPServer):
    """`failing`: None, "500", "silent" (requests are taken and never answered); `lost_after_start` fails so from then on."""

    daemon_threads = True

    def __init__(self, failing: str | None = None, lost_after_start: str | None = None):
        super().__init__(("127.0.0.1", 0), Requests)
        self.failing, self.lost_after_start = failing, lost_after_start
        self.history: list[dict] = []
        self.requests: list[str] = []
        self.over = threading.Event()

    def handle_error(self, *_):
        """Who asks may leave at any time."""

    @property
    def environment(self) -> dict[str, str]:
        return {"WANDB_BASE_URL": f"http://127.0.0.1:{self.server_port}", "WANDB_API_KEY": "0" * 40}


class Requests(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self):
        server, body = self.server, self.rfile.read(int(self.headers.get("content-length", 0)))
        server.requests.append(self.path)
        if server.failing == "silent":
            server.over.wait()
        if server.failing == "500":
            return self.answer({}, 500)
        if self.path == "/graphql":
            return self.answer({"data": self.graphql(json.loads(body))})
        if self.path.endswith("file_stream"):
            files = json.loads(body).get("files", {})
            rows = files.get("wandb-history.jsonl", {}).get("content", [])
            server.history += [json.loads(row) for row in rows]
            return self.answer({})
        return self.answer({}, 200 if self.path.startswith("/upload") else 404)

    do_GET = do_PUT = do_POST

    def graphql(self, asked):
        name, given = re.search(r"(?:query|mutation)\s+(\w+)", asked["query"])[1], asked.get("variables")
        if name == "UpsertBucket":
            self.server.failing = self.server.lost_after_start
            project = {"id": "p", "name": "test", "entity": {"id": "e", "name": "me"}}
            bucket = {"id": "b", "name": given.get("name"), "displayName": "", "config": "{}", "historyLineCount": 0}
            return {"upsertBucket": {"bucket": {**bucket, "project": project}, "inserted": True}}
        if name == "ArtifactType":
            return {"project": {"artifact": None}}
        if name == "CreateArtifact":
            latest = {"latestArtifact": None}
            return {"createArtifact": {"artifact": {"id": "a", "state": "COMMITTED", "artifactSequence": latest}}}
        if name == "CreateRunFiles":
            files = [{"name": file, "uploadUrl": f"{self.url()}/upload/{file}"} for file in given["files"]]
            return {"createRunFiles": {"runID": "b", "uploadHeaders": [], "files": files}}
        features = {"cliVersionInfo": {"max_cli_version": "9"}, "latestLocalVersionInfo": None, "features": []}
        return {"model": None, "viewer": {"id": "v", "entity": "me", "flags": "{}"}, "serverInfo": features}

    def url(self):
        return self.server.environment["WANDB_BASE_URL"]

    def answer(self, content, status=200):
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


@contextlib.contextmanager
def served(**how) -> Iterator[Server]:
    with Server(**how) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.over.set()
            server.shutdown()
