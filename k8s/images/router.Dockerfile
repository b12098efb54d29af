# The router (and the `warmfleet` command). Build from the top of the repository:
#   docker build -f k8s/images/router.Dockerfile -t warmfleet-router:0.1.0 .
FROM python:3.11-slim-bookworm AS build
WORKDIR /src
COPY app/requirements.lock app/build.lock ./
RUN python -m venv /opt/warmfleet \
    && /opt/warmfleet/bin/pip install --no-cache-dir --require-hashes -r requirements.lock \
    && python -m venv /opt/build \
    && /opt/build/bin/pip install --no-cache-dir --require-hashes -r build.lock
# In app/warmfleet, lua and protocol are links to the other two folders. The wheel holds real files in their place.
COPY pyproject.toml README.md LICENSE ./
COPY lua ./lua
COPY worker_plugin/warmfleet_worker/protocol ./worker_plugin/warmfleet_worker/protocol
COPY app ./app
RUN /opt/build/bin/pip wheel --no-cache-dir --no-deps --no-build-isolation --wheel-dir /opt/wheels . \
    && /opt/warmfleet/bin/pip install --no-cache-dir --no-deps --no-index /opt/wheels/*.whl

FROM python:3.11-slim-bookworm
COPY --from=build /opt/warmfleet /opt/warmfleet
ENV PATH=/opt/warmfleet/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    HOME=/tmp
USER 65532:65532
EXPOSE 8080 9090
ENTRYPOINT ["warmfleet"]
CMD ["serve"]
