#!/bin/sh
# Starts Redis in a container with the redis.conf and users.conf beside this file, for compose.yaml and kubernetes/.
# REDIS_PASSWORD is the administrator's; WORKER_PASSWORD, PRODUCER_PASSWORD, READER_PASSWORD and WEB_PASSWORD
# are the users'.
# The configuration is passed through standard input, because `ps` shows arguments. Later lines override earlier ones.
set -eu
cd "$(dirname "$0")"

# An empty password would allow access without one.
missing="is missing: create .env as described in .env.example"
: "${REDIS_PASSWORD:?$missing}" "${WORKER_PASSWORD:?$missing}" "${PRODUCER_PASSWORD:?$missing}" \
  "${READER_PASSWORD:?$missing}" "${WEB_PASSWORD:?$missing}" "${REDIS_MAXMEMORY:?$missing}"

digest() {
  printf %s "$1" | sha256sum | cut -d' ' -f1
}

users=$(sed -e "s/#WORKER/#$(digest "$WORKER_PASSWORD")/" \
  -e "s/#PRODUCER/#$(digest "$PRODUCER_PASSWORD")/" \
  -e "s/#READER/#$(digest "$READER_PASSWORD")/" \
  -e "s/#WEB/#$(digest "$WEB_PASSWORD")/" users.conf)
exec redis-server - <<END
$(cat redis.conf)
$users
bind * -::*
dir /data
maxmemory $REDIS_MAXMEMORY
requirepass $REDIS_PASSWORD
END
