"""Open-loop load on any OpenAI-compatible address, with Locust:

    locust -f loadtest/locustfile.py -H http://127.0.0.1:8080                              # web page on port 8089
    locust -f loadtest/locustfile.py -H URL --headless --rate 8 --seconds 120              # no page; all four kinds
    locust -f loadtest/locustfile.py -H URL --headless --rate 8 --arrivals burst           # ten hard seconds a minute
    locust -f loadtest/locustfile.py -H URL --headless --mix chat=3,rag=1                  # two kinds
    locust -f loadtest/locustfile.py -H URL --headless --trace agents --seconds 0          # a trace, to its end
    locust -f loadtest/locustfile.py -H URL --headless --rate 200 --processes 4            # four sending processes
    OPENAI_API_KEY=... locust -f loadtest/locustfile.py -H https://llm.example.com/v1      # with a bearer token

--rate is the number of requests per second, and it holds however slow the server is: requests arrive in an open loop.
Locust's --users, --spawn-rate and --run-time have no meaning here. The kinds of sessions are in
``warmfleet_loadtest/users/sessions.py``: chat (growing conversations), rag (a long shared document, short questions),
agent (a long prefix, many short turns) and one-off. Each request opens a connection of its own, and is sent again, at
most twice, if its connection breaks, as the OpenAI clients do. Any HTTP error is a failure at once.

Locust's rows of type ``answer`` are whole answers, ``TTFT`` the time to the first token (both from when a request was
due), and ``gap`` the mean time between tokens; all in ms. The page "Cache and tokens" has the share of prompt tokens
that came from caches, from the answers' own usage (prompt_tokens_details.cached_tokens). SIGUSR1 ends a run: users send
no further request and finish those they have.
"""

from argparse import RawDescriptionHelpFormatter

from locust import events
from locust.argument_parser import get_empty_argument_parser

from warmfleet_loadtest.users.run_events import OpenLoop, add_options, listen
from warmfleet_loadtest.users.sources import AgentUser, ChatUser, OneOffUser, RagUser, TraceUser

__all__ = ["AgentUser", "ChatUser", "OneOffUser", "OpenLoop", "RagUser", "TraceUser"]

listen(events)

if __name__ == "__main__":  # `locust --help` ends before it reads this file
    parser = get_empty_argument_parser()
    parser.description, parser.formatter_class = __doc__, RawDescriptionHelpFormatter
    parser.epilog = None  # Locust's own examples
    add_options(parser)
    parser.parse_args()
    parser.print_help()
