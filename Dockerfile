# The web page and API of a bank, on a CPU:
#   docker build -t sscd-vec .
#   docker run --rm -p 8000:8000 -e SSCD_VEC_TOKEN=secret -v "$PWD/bank:/bank" sscd-vec
FROM python:3.11-slim

WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY sscd_vec sscd_vec
RUN pip install --no-cache-dir ".[app]" && useradd --create-home --uid 1000 sscd

USER 1000
WORKDIR /bank
VOLUME /bank
EXPOSE 8000
HEALTHCHECK CMD ["python", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:8000/health', timeout=5)"]
ENTRYPOINT ["sscd-vec"]
CMD ["serve", "/bank/known.faiss", "--host", "0.0.0.0"]
