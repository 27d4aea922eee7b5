"""A board over loopback, and what to ask it."""

import contextlib
import http.client
import json
import threading
import urllib.parse

from tests.harness import until
from troupe.services.board.app import Board
from troupe.services.board.command import listen
from troupe.services.board.library import Library
from troupe.services.board.watching import Watch
from troupe.services.board.web import web_server


class Served:
    """A server in this process, at a port of its own.

    Attributes:
        address: for a browser, without a `/` at its end.
    """

    def __init__(self, *roots, token=""):
        self.library = Library(roots)
        self.watch = Watch(self.library)
        self._listener = listen("127.0.0.1", 0)
        self.port = self._listener.getsockname()[1]
        self.address = f"http://localhost:{self.port}"
        self._server = web_server(Board(self.library, self.watch).app(token))
        self._thread = threading.Thread(target=self._server.run, args=([self._listener],), daemon=True)
        self.watch.start()
        self._thread.start()
        until(lambda: self._server.started)

    def ask(self, path, method="GET", body=None, **headers):
        """An answer: its status, headers in small letters, and bytes."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        named = {"host": f"localhost:{self.port}"} | {
            name.replace("_", "-"): v for name, v in headers.items()
        }
        with contextlib.closing(connection):
            connection.request(method, path, body, named)
            answer = connection.getresponse()
            fields = {name.lower(): value for name, value in answer.getheaders()}
            return answer.status, fields, answer.read()

    def json(self, path, **query):
        """The JSON of an answer that is one."""
        words = urllib.parse.urlencode(query)
        status, _, body = self.ask(f"/api/{path}" + (f"?{words}" if words else ""))
        assert status == 200, (status, body)
        return json.loads(body)

    def runs(self, count):
        """Rows of all runs by name, as soon as there are so many and all are read."""

        def listed():
            found = self.json("runs")
            return found["runs"] if found["complete"] and len(found["runs"]) == count else None

        return {row["name"]: row for row in until(listed)}

    def put_note(self, run, text, **headers):
        """The status of writing a note."""
        headers = {"content_type": "application/json"} | headers
        return self.ask(f"/api/runs/{run}/note", "PUT", json.dumps({"text": text}), **headers)[0]

    def look_again(self):
        """Have it look for runs now."""
        self.library._searched_s = -1e9
        self.library.refresh()

    def close(self):
        """End it."""
        self.watch.stop()
        self._server.should_exit = True
        self._thread.join(60)
        assert not self._thread.is_alive()
        self._listener.close()
