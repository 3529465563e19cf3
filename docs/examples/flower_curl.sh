#!/usr/bin/env bash
# Classify posts through Flower's REST API, using only curl.
#
#   FEEDMILL_FLOWER_PASSWORD=... ./flower_curl.sh [ARGUMENTS]
#
# ARGUMENTS is a JSON object: the arguments of feedmill.classify. FLOWER_URL is Flower's address. The script prints
# Flower's response, whose `result` has one outcome per post. If the message failed, `result` is the reason and the exit
# status is 1.
set -euo pipefail

flower=${FLOWER_URL:-http://127.0.0.1:5555}
example='{"version": 1, "posts": [{"id": "c1", "title": "The keeper saved two penalties"}], "labels": "sport, kitchen"}'
arguments=${1:-$example}

# Pass the password through a pipe: every user of the machine can read command lines.
login() {
  if [ -n "${FEEDMILL_FLOWER_PASSWORD:-}" ]; then
    printf 'header = "Authorization: Basic %s"\n' \
      "$(printf %s "feedmill:$FEEDMILL_FLOWER_PASSWORD" | base64 | tr -d '\n')"
  fi
}

ask() {
  curl --silent --show-error --fail-with-body --config <(login) "$@"
}

if ! sent=$(ask --data "{\"kwargs\": $arguments, \"queue\": \"feedmill\"}" "$flower/api/task/send-task/feedmill.classify"); then
  echo "Flower refused the message: ${sent:-see the error above; 401 means a wrong user or password}" >&2
  exit 1
fi
id=$(sed -n 's/.*"task-id": *"\([^"]*\)".*/\1/p' <<<"$sent")

# The first call waits up to 60 seconds, but returns the state from before the wait. The second call returns the result.
ask --output /dev/null "$flower/api/task/result/$id?timeout=60"
answer=$(ask "$flower/api/task/result/$id")
echo "$answer"
grep -q '"state": *"SUCCESS"' <<<"$answer"
