// The package's own runner finds no tests: vitest leaves out node_modules.
import { runConformanceTests } from "@durable-streams/server-conformance-tests"

runConformanceTests({ baseUrl: process.env.STREAMS_URL, subscriptions: true })
