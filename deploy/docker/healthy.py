# SPDX-License-Identifier: Apache-2.0
"""healthy.py KIT: exit code 0 if the server of this startup kit takes connections."""

import json
import socket
import sys
from pathlib import Path

servers = json.loads(Path(sys.argv[1], "startup", "fed_server.json").read_text(encoding="utf-8"))["servers"]
port = int(servers[0]["service"]["target"].rpartition(":")[2])
socket.create_connection(("localhost", port), timeout=5).close()
