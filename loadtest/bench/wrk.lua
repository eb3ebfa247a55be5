-- Appends one entry per request, with the payload size from the argument. The last line of output is the result as JSON.

function init(args)
  wrk.method = "POST"
  wrk.headers["Content-Type"] = "application/octet-stream"
  wrk.body = string.rep("x", tonumber(args[1]))
end

function done(summary, latency, requests)
  local errors = 0
  for _, count in pairs(summary.errors) do
    errors = errors + count
  end
  io.write(string.format(
    '{"requests":%d,"us":%d,"errors":%d,"latency_us":{"50":%d,"99":%d,"99.9":%d}}\n',
    summary.requests, summary.duration, errors,
    latency:percentile(50), latency:percentile(99), latency:percentile(99.9)
  ))
end
