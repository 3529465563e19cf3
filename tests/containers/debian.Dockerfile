# Redis and Prometheus from Debian's packages, for machines without a registry. See __main__.py.
ARG PYTHON
FROM $PYTHON
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install --yes --no-install-recommends redis-server prometheus wget \
 && rm -rf /var/lib/apt/lists/* \
 && install --directory --owner redis --group redis /data \
 && install --directory --owner nobody --group nogroup /prometheus
