"""`invar serve` from its listening socket on, over a model that never stops talking.

Words: seconds for running requests at the end, seconds of a step, tokens of the context; perhaps
a folder for responses.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from api.scripted import endless, served

from invar.api.app import create_app
from invar.api.response_store import KeptResponses, ResponseStore
from invar.cli.listening import BACKLOG, EarlyEnd, listen, run_server
from invar.observe.access_log import AccessLog
from invar.observe.logs import set_up_logging

set_up_logging("info")
EarlyEnd()
server, _ = served(endless(pause_s=float(sys.argv[2])), max_model_len=int(sys.argv[3]))
if len(sys.argv) > 4:
    server.responses = KeptResponses(ResponseStore(sys.argv[4]))
server.access_log = AccessLog(sys.stderr.fileno(), server.metrics.count_dropped_line)
listener = listen("127.0.0.1", 0)
listener.listen(BACKLOG)
print(f"Listening on http://127.0.0.1:{listener.getsockname()[1]}", flush=True)
app, timeout_s = create_app(server), float(sys.argv[1])
sys.exit(run_server(app, server, listener, drain_timeout_s=timeout_s))
