# This shell is process 1, so it gets the signals and must end its child.
child=
trap 'test -z "$$child" || kill "$$child" 2>/dev/null; wait; exit 0' TERM INT
run() { "$$@" & child=$$!; wait "$$child"; code=$$?; child=; return "$$code"; }
while :; do
  ${pod_warm}run $pod_run clean --quiet --no-wait || [ $$? -eq 6 ] || echo 'not cleaned' >&2
  run sleep 3600
done
