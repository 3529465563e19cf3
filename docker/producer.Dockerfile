# Image for everything that needs no torch: sending posts, reading Reddit, Flower, metrics, status, results, exports.
#
#   docker build --file docker/producer.Dockerfile --tag feedmill-producer .
#
# For exports, add pyarrow (160 MB): --build-arg EXTRAS=bluesky,feeds,reddit,dumps,monitor,tables

# Digest of the multi-platform tag, copied from public Dockerfiles and not checked against a registry.
ARG PYTHON=python:3.12.13-slim-bookworm@sha256:8a7e7cc04fd3e2bd787f7f24e22d5d119aa590d429b50c95dfe12b3abe52f48b

FROM $PYTHON AS build
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install --yes --no-install-recommends binutils \
 && rm -rf /var/lib/apt/lists/*
ARG EXTRAS=bluesky,feeds,reddit,dumps,monitor
WORKDIR /source
COPY pyproject.toml constraints.txt README.md LICENSE NOTICE ./
COPY feedmill feedmill
COPY shared shared
COPY producers producers
COPY workers workers
# Without pip, so that nothing can be installed later. Without tests and symbols.
RUN python -m venv --without-pip /opt/feedmill \
 && python -m pip --python /opt/feedmill/bin/python install --no-cache-dir --disable-pip-version-check \
    --constraint constraints.txt ".[$EXTRAS]" \
 && find /opt/feedmill/lib -type d -name tests -prune -exec rm -r {} + \
 && find /opt/feedmill/lib -name '*.so' -exec strip --strip-unneeded {} +

FROM $PYTHON
RUN useradd --uid 10001 --create-home feedmill \
 && install --directory --owner feedmill --group feedmill --mode 0700 /var/lib/feedmill
COPY --from=build /opt/feedmill /opt/feedmill
# If a metrics port is set, it listens on the container's network.
ENV PATH=/opt/feedmill/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    FEEDMILL_DATA_FOLDER=/var/lib/feedmill \
    FEEDMILL_METRICS_ADDRESS=0.0.0.0
# Numeric, so that Kubernetes can verify that it is not root.
USER 10001
WORKDIR /home/feedmill
# Works for every command. compose.yaml queries each service's own port instead, which is cheaper.
HEALTHCHECK --interval=60s --timeout=10s --start-period=30s CMD ["feedmill", "health", "--check", "redis"]
# Exec form: signals reach the command itself.
ENTRYPOINT ["feedmill"]
CMD ["--help"]
