// The Durable Streams project's own server with its file-backed store, unmodified. Arguments: the port, and the folder for data.
import { DurableStreamTestServer } from "@durable-streams/server"

const [port, dataDir] = process.argv.slice(2)
const server = new DurableStreamTestServer({ port: Number(port), host: "127.0.0.1", dataDir })
await server.start()
