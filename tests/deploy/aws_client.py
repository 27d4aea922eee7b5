"""boto3 for a process that lacks it: one call a line, one answer a line, both JSON. Run with moto's Python.

A call is [SERVICE, METHOD, {ARGUMENT: VALUE}]; an answer {"reply": ...} or {"error": "..."}.
"""

import functools
import json
import sys

import boto3
from botocore.exceptions import BotoCoreError, ClientError

client = functools.cache(boto3.client)

if __name__ == "__main__":
    for line in sys.stdin:
        service, method, arguments = json.loads(line)
        try:
            answer = {"reply": getattr(client(service), method)(**arguments)}
        except (BotoCoreError, ClientError) as error:
            answer = {"error": str(error)}
        print(json.dumps(answer, default=str), flush=True)
