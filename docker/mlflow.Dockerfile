# The MLflow server, with PostgreSQL, S3 and basic authentication.
ARG PYTHON_IMAGE=docker.io/library/python:3.11-slim-bookworm

FROM ${PYTHON_IMAGE} AS dependencies
ENV PIP_CONSTRAINT=/build/requirements.lock \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PIP_ROOT_USER_ACTION=ignore
WORKDIR /build
RUN python3 -m venv pip && python3 -m venv --without-pip /opt/venv
COPY requirements.lock docker/mlflow.requirements.txt ./
RUN --mount=type=secret,id=pip,target=/etc/pip.conf --mount=type=cache,target=/root/.cache/pip \
    pip/bin/pip --python /opt/venv/bin/python install -r mlflow.requirements.txt

FROM ${PYTHON_IMAGE}
RUN mkdir -m 1777 /workspace
# Any user, named or not, can run this image, and only /tmp must be writable. The
# disabled jobs are for MLflow's GenAI features and take 1.8 GB.
ENV HOME=/tmp \
    LOGNAME=mlflow \
    MLFLOW_DISABLE_TELEMETRY=true \
    MLFLOW_SERVER_ENABLE_JOB_EXECUTION=false \
    PATH=/opt/venv/bin:${PATH} \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    TMPDIR=/tmp
COPY --from=dependencies /opt/venv /opt/venv
WORKDIR /workspace
USER 10001:10001
RUN --mount=type=bind,source=docker/smoke,target=/smoke sh /smoke/mlflow.sh
EXPOSE 5000
ARG VERSION=unknown
ARG REVISION=unknown
ARG CREATED=unknown
LABEL org.opencontainers.image.title="d2plm-mlflow" \
      org.opencontainers.image.description="The MLflow server of D2PLM" \
      org.opencontainers.image.licenses="MIT" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.created="${CREATED}"
ENTRYPOINT ["mlflow"]
CMD ["server", "--host", "0.0.0.0", "--port", "5000"]
