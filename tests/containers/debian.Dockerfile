# Redis, Prometheus and a router from Debian's packages, for tests of machines without a registry. See engine.py.
ARG BASE
FROM $BASE
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install --yes --no-install-recommends redis-server prometheus iproute2 wget \
 && rm -rf /var/lib/apt/lists/* \
 && install --directory --owner redis --group redis /data \
 && install --directory --owner nobody --group nogroup /prometheus
