"""boto3 in a process of its own: the Python of the tests has none."""

from __future__ import annotations

import json
import subprocess
import threading
from pathlib import Path
from typing import Any

from tests.deploy.conftest import Cloud


class Client:
    """Asks a stand-in for AWS."""

    def __init__(self, cloud: Cloud, deploy_python: str) -> None:
        self._lock = threading.Lock()
        words = [deploy_python, str(Path(__file__).with_name("aws_client.py"))]
        self._process = subprocess.Popen(
            words, env=cloud.env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def ask(self, service: str, method: str, **arguments: Any) -> Any:
        """Call AWS; what boto3 returns, as JSON. Any thread may."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with self._lock:
            self._process.stdin.write(json.dumps([service, method, arguments]) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        answer = json.loads(line or '{"error": "the client has ended"}')
        if "error" in answer:
            raise RuntimeError(f"{service} {method}: {answer['error']}")
        return answer["reply"]

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(30)
        self._process.stdout.close()
