import { defineConfig } from "vitest/config"

// Property tests send hundreds of requests, each of which is synced to three disks.
export default defineConfig({ test: { include: ["streams.test.js"], testTimeout: 60000, hookTimeout: 60000 } })
