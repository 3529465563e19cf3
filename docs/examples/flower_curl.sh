#!/usr/bin/env bash
# Labels for posts through Flower's REST API, with nothing but curl.
#
#   FEEDMILL_FLOWER_USER=... FEEDMILL_FLOWER_PASSWORD=... ./flower_curl.sh [ARGUMENTS]
#
# ARGUMENTS: of feedmill.classify, a JSON object. It prints Flower's answer, whose `result` has one outcome per post, and
# ends with status 1 where the message failed: `result` is the reason then. FLOWER_URL: where Flower is.
set -euo pipefail

flower=${FLOWER_URL:-http://127.0.0.1:5555}
example='{"version": 1, "posts": [{"id": "c1", "title": "The keeper saved two penalties"}], "labels": "sport, kitchen"}'
arguments=${1:-$example}

# Through a file that is none: a password on a command line can be read by everyone on the machine.
login() {
  if [ -n "${FEEDMILL_FLOWER_PASSWORD:-}" ]; then
    printf 'header = "Authorization: Basic %s"\n' \
      "$(printf %s "${FEEDMILL_FLOWER_USER:-feedmill}:$FEEDMILL_FLOWER_PASSWORD" | base64 | tr -d '\n')"
  fi
}

ask() {
  curl --silent --show-error --fail-with-body --config <(login) "$@"
}

if ! sent=$(ask --data "{\"kwargs\": $arguments, \"queue\": \"feedmill\"}" "$flower/api/task/send-task/feedmill.classify"); then
  echo "Flower says: $sent" >&2
  exit 1
fi
id=$(sed -n 's/.*"task-id": *"\([^"]*\)".*/\1/p' <<<"$sent")

# The first call waits, for 60 seconds at most; the state that it tells is the one from before.
ask --output /dev/null "$flower/api/task/result/$id?timeout=60"
answer=$(ask "$flower/api/task/result/$id")
echo "$answer"
grep -q '"state": *"SUCCESS"' <<<"$answer"
