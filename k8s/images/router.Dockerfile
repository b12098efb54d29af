# The router (and the `warmfleet` command). Build from the top of the repository:
#   docker build -f k8s/images/router.Dockerfile -t warmfleet-router:0.1.0 .
FROM python:3.11-slim-bookworm AS build
WORKDIR /src
COPY app/requirements.lock ./
RUN python -m venv /opt/warmfleet \
    && /opt/warmfleet/bin/pip install --no-cache-dir --require-hashes -r requirements.lock
# app/warmfleet/lua links to lua/: the link becomes real files in the wheel.
COPY pyproject.toml README.md LICENSE ./
COPY lua ./lua
COPY loadtest ./loadtest
COPY worker_plugin ./worker_plugin
COPY app ./app
RUN /opt/warmfleet/bin/pip install --no-cache-dir --no-deps --no-build-isolation ./worker_plugin .

FROM python:3.11-slim-bookworm
COPY --from=build /opt/warmfleet /opt/warmfleet
ENV PATH=/opt/warmfleet/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    HOME=/tmp
USER 65532:65532
EXPOSE 8080
ENTRYPOINT ["warmfleet"]
CMD ["serve"]
