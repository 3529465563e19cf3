#!/bin/sh
# Starts Redis in a container, by redis.conf and users.conf beside this file; compose.yaml and kubernetes/ do it so.
# REDIS_PASSWORD is the administrator's; WORKER_PASSWORD, PRODUCER_PASSWORD and READER_PASSWORD are the users'.
# Passwords come in where `ps` does not show them. Of a line that is there twice the later one counts.
set -eu
cd "$(dirname "$0")"

# An empty one would let everybody in.
missing="is missing: make .env as .env.example says"
: "${REDIS_PASSWORD:?$missing}" "${WORKER_PASSWORD:?$missing}" "${PRODUCER_PASSWORD:?$missing}" \
  "${READER_PASSWORD:?$missing}" "${REDIS_MAXMEMORY:?$missing}"

digest() {
  printf %s "$1" | sha256sum | cut -d' ' -f1
}

users=$(sed -e "s/#WORKER/#$(digest "$WORKER_PASSWORD")/" \
  -e "s/#PRODUCER/#$(digest "$PRODUCER_PASSWORD")/" \
  -e "s/#READER/#$(digest "$READER_PASSWORD")/" users.conf)
exec redis-server - <<END
$(cat redis.conf)
$users
bind * -::*
dir /data
maxmemory $REDIS_MAXMEMORY
requirepass $REDIS_PASSWORD
END
