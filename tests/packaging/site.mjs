// Opens pages of a site in headless Chromium: [origin, pages, widths] as JSON. Prints, for each page and width, what the
// console said, what was asked from elsewhere or was not there, and by how many pixels the page is wider than the window.
// At last it types into the search of the first page and says how many results come.
import { existsSync } from "node:fs";
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

const require = createRequire(process.env.STORES + "/");
const load = async (name) => import(pathToFileURL(require.resolve(name)).href);
const system = ["/usr/bin/chromium", "/usr/bin/google-chrome"].find((one) => existsSync(one));
const bundled = system ? null : (await load("@sparticuz/chromium")).default;
const { chromium } = (await load("playwright-core")).default ?? (await load("playwright-core"));
const [origin, pages, widths] = JSON.parse(process.argv[2]);
const quiet = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
  "--disable-component-update", "--disable-sync"];
const browser = await chromium.launch({
  args: bundled ? bundled.args : quiet, executablePath: system ?? await bundled.executablePath(), headless: true,
});
const told = [];
let errors = [], foreign = [];
// One page for all widths: a bundled Chromium, which runs in a single process, may end with a context that is closed.
const page = await (await browser.newContext({ viewport: { width: widths[0], height: 900 } })).newPage();
page.on("console", (one) => { if (["error", "warning"].includes(one.type())) errors.push(one.text()); });
page.on("pageerror", (one) => errors.push(String(one)));
page.on("request", (one) => { if (!/^(data|blob):/.test(one.url()) && !one.url().startsWith(origin)) foreign.push(one.url()); });
page.on("response", (one) => { if (one.status() >= 400) errors.push(`${one.status()} ${one.url()}`); });
for (const width of widths) {
  await page.setViewportSize({ width, height: 900 });
  for (const name of pages) {
    errors = [], foreign = [];
    await page.goto(`${origin}/${name}`, { waitUntil: "load" });
    const wider = await page.evaluate(() => document.scrollingElement.scrollWidth - window.innerWidth);
    told.push({ name, width, errors, foreign, wider });
  }
}
await page.setViewportSize({ width: 1400, height: 900 });
await page.goto(`${origin}/${pages[0]}`);
await page.fill("[data-md-component=search-query]", "retention");
await page.waitForSelector(".md-search-result__item");
const results = await page.locator(".md-search-result__item").count();
await browser.close();
console.log(JSON.stringify({ told, results }));
