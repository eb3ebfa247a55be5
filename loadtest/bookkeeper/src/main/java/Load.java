import static java.nio.charset.StandardCharsets.UTF_8;

import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.util.Arrays;
import java.util.HashMap;
import java.util.Locale;
import java.util.Map;
import java.util.Random;
import java.util.concurrent.Semaphore;
import java.util.concurrent.atomic.AtomicInteger;
import org.apache.bookkeeper.client.BKException;
import org.apache.bookkeeper.client.BookKeeper;
import org.apache.bookkeeper.client.BookKeeper.DigestType;
import org.apache.bookkeeper.client.BookKeeperAdmin;
import org.apache.bookkeeper.client.LedgerHandle;
import org.apache.bookkeeper.client.api.LedgerEntries;
import org.apache.bookkeeper.client.api.LedgerEntry;
import org.apache.bookkeeper.conf.ClientConfiguration;
import org.apache.bookkeeper.conf.ServerConfiguration;

/**
 * A client of BookKeeper that makes load. Each line of standard input is a command, and the answer is a line of JSON. If
 * the command failed, the JSON has the member "error".
 *
 * <p>One JVM serves all rounds, so that its code is compiled only once.
 */
public final class Load {
    private static final byte[] PASSWORD = "".getBytes(UTF_8);
    private static final long BATCH_BYTES = 4 << 20;

    private final BookKeeper client;
    /** A second client, which recovers ledgers of the first one. */
    private final BookKeeper second;
    private final BookKeeperAdmin admin;
    private final Map<Long, LedgerHandle> written = new HashMap<>();

    private Load(String metadata) throws Exception {
        client = new BookKeeper(configuration(metadata));
        second = new BookKeeper(configuration(metadata));
        admin = new BookKeeperAdmin(client, configuration(metadata));
    }

    public static void main(String[] arguments) throws Exception {
        String metadata = arguments[0];
        ServerConfiguration servers = new ServerConfiguration();
        servers.setMetadataServiceUri(metadata);
        BookKeeperAdmin.initNewCluster(servers);
        Load load = new Load(metadata);
        answer("{}");
        BufferedReader commands = new BufferedReader(new InputStreamReader(System.in, UTF_8));
        for (String line = commands.readLine(); line != null; line = commands.readLine()) {
            answer(load.answerTo(line.split(" ")));
        }
        System.exit(0);
    }

    private static ClientConfiguration configuration(String metadata) {
        ClientConfiguration settings = new ClientConfiguration();
        settings.setMetadataServiceUri(metadata);
        settings.setUseV2WireProtocol(true);
        settings.setThrottleValue(0);
        settings.setStickyReadsEnabled(true);
        settings.setBatchReadEnabled(true);
        settings.setRecoveryBatchReadEnabled(true);
        settings.setRecoveryReadBatchSize(1000);
        return settings;
    }

    private static void answer(String json) {
        System.out.println(json);
        System.out.flush();
    }

    /**
     * Runs a command and returns its answer. An exception must not end the thread that reads commands, since the JVM
     * would continue without it.
     */
    private String answerTo(String[] words) {
        try {
            return run(words);
        } catch (Exception error) {
            error.printStackTrace();
            String text = error.toString().replaceAll("[\\\\\"\\p{Cntrl}]", " ");
            return String.format("{\"error\":\"%s\"}", text);
        }
    }

    private String run(String[] words) throws Exception {
        switch (words[0]) {
            case "bookies":
                return String.format("{\"bookies\":%d}", admin.getAvailableBookies().size());
            case "create":
                LedgerHandle made = client.createLedger(3, 3, 2, DigestType.CRC32C, PASSWORD);
                written.put(made.getId(), made);
                return String.format("{\"ledger\":%d}", made.getId());
            case "append":
                return append(
                        written.get(Long.parseLong(words[1])),
                        Integer.parseInt(words[2]),
                        Double.parseDouble(words[3]),
                        Integer.parseInt(words[4]));
            case "fill":
                return fill(written.get(Long.parseLong(words[1])), Integer.parseInt(words[2]));
            case "read":
                return read(
                        Long.parseLong(words[1]),
                        words[2].equals("batched"),
                        Integer.parseInt(words[3]),
                        Double.parseDouble(words[4]));
            case "recover":
                return recover(Long.parseLong(words[1]));
            case "delete":
                written.remove(Long.parseLong(words[1]));
                client.deleteLedger(Long.parseLong(words[1]));
                return "{}";
            default:
                throw new IllegalArgumentException(words[0]);
        }
    }

    /** Appends with a number of concurrent calls, for some seconds. */
    private static String append(LedgerHandle ledger, int inFlight, double seconds, int size)
            throws InterruptedException {
        byte[] payload = payload(size);
        Semaphore room = new Semaphore(inFlight);
        Appended appended = new Appended();
        long start = System.nanoTime();
        long end = start + (long) (seconds * 1e9);
        while (System.nanoTime() < end) {
            room.acquire();
            long began = System.nanoTime();
            ledger.asyncAddEntry(
                    payload,
                    (status, handle, entry, context) -> {
                        appended.done(status, began);
                        room.release();
                    },
                    null);
        }
        room.acquire(inFlight);
        return appended.json(System.nanoTime() - start);
    }

    /** The results of appends. Their callbacks run one after another, in the ledger's thread. */
    private static final class Appended {
        private long[] times = new long[1 << 16];
        private int count;
        private int failed;
        private long last;
        private long gap;

        synchronized void done(int status, long began) {
            if (status != BKException.Code.OK) {
                failed++;
                return;
            }
            long now = System.nanoTime();
            gap = last == 0 ? 0 : Math.max(gap, now - last);
            last = now;
            if (count == times.length) {
                times = Arrays.copyOf(times, 2 * count);
            }
            times[count++] = now - began;
        }

        synchronized String json(long nanos) {
            long[] sorted = Arrays.copyOf(times, count);
            Arrays.sort(sorted);
            return String.format(
                    Locale.ROOT,
                    "{\"entries\":%d,\"s\":%.6f,\"failed\":%d,\"gap ms\":%.3f,"
                            + "\"p50 ms\":%.3f,\"p99 ms\":%.3f,\"p99.9 ms\":%.3f}",
                    count,
                    nanos / 1e9,
                    failed,
                    gap / 1e6,
                    sorted[(int) (count * 0.5)] / 1e6,
                    sorted[(int) (count * 0.99)] / 1e6,
                    sorted[(int) (count * 0.999)] / 1e6);
        }
    }

    private static String fill(LedgerHandle ledger, int count) throws Exception {
        byte[] payload = payload(1024);
        Semaphore room = new Semaphore(1000);
        AtomicInteger failed = new AtomicInteger();
        for (int number = 0; number < count; number++) {
            room.acquire();
            ledger.asyncAddEntry(
                    payload,
                    (status, handle, entry, context) -> {
                        failed.compareAndSet(0, status);
                        room.release();
                    },
                    null);
        }
        room.acquire(1000);
        if (failed.get() != 0) {
            throw BKException.create(failed.get());
        }
        return String.format("{\"entries\":%d}", ledger.getLastAddConfirmed() + 1);
    }

    /** Reads a ledger in order, repeatedly, with one request at a time for at most {@code limit} entries. */
    private String read(long id, boolean isBatched, int limit, double seconds) throws Exception {
        try (LedgerHandle ledger = client.openLedgerNoRecovery(id, DigestType.CRC32C, PASSWORD)) {
            long end = ledger.getLastAddConfirmed() + 1;
            long start = System.nanoTime();
            long nanos = 0;
            long read = 0;
            for (long next = 0; nanos < seconds * 1e9; nanos = System.nanoTime() - start) {
                // Limited to this handle's end, because a bookie may return entries beyond it.
                int count = (int) Math.min(limit, end - next);
                try (LedgerEntries page =
                        isBatched
                                ? ledger.batchRead(next, count, BATCH_BYTES)
                                : ledger.read(next, next + count - 1)) {
                    for (LedgerEntry entry : page) {
                        entry.getEntryBytes();
                        next++;
                        read++;
                    }
                }
                next = next == end ? 0 : next;
            }
            return String.format(
                    Locale.ROOT, "{\"entries\":%d,\"s\":%.6f}", read, nanos / 1e9);
        }
    }

    /** Recovers a ledger that another client still writes. */
    private String recover(long id) throws Exception {
        long start = System.nanoTime();
        try (LedgerHandle ledger = second.openLedger(id, DigestType.CRC32C, PASSWORD)) {
            return String.format(
                    Locale.ROOT,
                    "{\"entries\":%d,\"s\":%.6f}",
                    ledger.getLastAddConfirmed() + 1,
                    (System.nanoTime() - start) / 1e9);
        }
    }

    private static byte[] payload(int size) {
        byte[] payload = new byte[size];
        new Random(1).nextBytes(payload);
        return payload;
    }
}
