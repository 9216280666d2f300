# Image for training, evaluation, registration, generation, serving, and the steps of the pipeline.
#
#   make image-trainer                  torch for CPUs
#   make image-trainer VARIANT=cuda     torch for NVIDIA GPUs
#
# All versions come from requirements.lock. The large layer of dependencies does not contain d2plm,
# so that after a change of the code only about a megabyte is pushed.
ARG PYTHON_IMAGE=docker.io/library/python:3.11-slim-bookworm

FROM ${PYTHON_IMAGE} AS dependencies
# The index of torch's CPU or CUDA build, in addition to PyPI.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ARG EXTRAS="pipelines system-metrics tracking-server tensorboard wandb"
ENV PIP_BUILD_CONSTRAINT=/build/requirements.lock \
    PIP_CONSTRAINT=/build/requirements.lock \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PIP_ROOT_USER_ACTION=ignore
WORKDIR /build
# pip has a separate environment and is not copied to the final image.
RUN python3 -m venv pip && python3 -m venv --without-pip /opt/venv
COPY requirements.lock pyproject.toml docker/requirements.py ./
RUN --mount=type=secret,id=pip,target=/etc/pip.conf --mount=type=cache,target=/root/.cache/pip \
    python3 requirements.py ${EXTRAS} > requirements.txt \
    && pip/bin/pip --python /opt/venv/bin/python install \
        --extra-index-url "${TORCH_INDEX}" -r requirements.txt

FROM dependencies AS package
COPY README.md LICENSE ./
COPY configs configs
COPY examples/data examples/data
COPY examples/pretrained examples/pretrained
COPY d2plm d2plm
COPY pipelines pipelines
RUN --mount=type=secret,id=pip,target=/etc/pip.conf --mount=type=cache,target=/root/.cache/pip \
    pip/bin/pip --python /opt/venv/bin/python install \
        --no-deps --root /package --prefix /opt/venv .

FROM ${PYTHON_IMAGE}
# Additional Debian packages at run time: "g++" lets torch.compile build CPU kernels.
ARG SYSTEM_PACKAGES=
# hadolint ignore=DL3008
RUN if [ -n "${SYSTEM_PACKAGES}" ]; then \
        apt-get update \
        && apt-get install -y --no-install-recommends ${SYSTEM_PACKAGES} \
        && rm -rf /var/lib/apt/lists/*; \
    fi \
    && mkdir -m 1777 /workspace
# Any user, named or not, can run this image, and only /tmp must be writable.
ENV HOME=/tmp \
    LOGNAME=d2plm \
    MLFLOW_DISABLE_TELEMETRY=true \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    PATH=/opt/venv/bin:${PATH} \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    TMPDIR=/tmp
COPY --from=dependencies /opt/venv /opt/venv
COPY examples/data /opt/d2plm/examples/data
COPY examples/pretrained /opt/d2plm/examples/pretrained
COPY --from=package /package/ /
WORKDIR /workspace
USER 10001:10001
RUN --mount=type=bind,source=docker/smoke,target=/smoke sh /smoke/trainer.sh
ARG VERSION=unknown
ARG REVISION=unknown
ARG CREATED=unknown
LABEL org.opencontainers.image.title="d2plm-trainer" \
      org.opencontainers.image.description="Trains protein language models by discrete diffusion and flow matching" \
      org.opencontainers.image.licenses="MIT" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.created="${CREATED}"
ENTRYPOINT ["d2plm"]
CMD ["--help"]
