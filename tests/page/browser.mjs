// Opens one file in headless Chromium, goes through the steps of the first argument, and prints as JSON what came of it:
// {ms, errors, requests, values}. A step is ["eval", expression], ["click", selector], ["fill", selector, text],
// ["hover", selector, x, y], ["drag", selector, from x, to x], ["wheel", selector, delta, with Ctrl], ["scroll", y],
// ["key", name], ["reload"], ["wait", expression], ["shot", path, only what is seen] or ["axe"], which gives what
// axe-core finds: [impact, rule, element]. The browser is the system's Chromium, where there is one.
import { existsSync, readFileSync } from "node:fs";
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

const require = createRequire(process.env.STORES + "/");
const load = async (name) => import(pathToFileURL(require.resolve(name)).href);
const system = ["/usr/bin/chromium", "/usr/bin/google-chrome"].find((one) => existsSync(one));
const chromium = system ? null : (await load("@sparticuz/chromium")).default;
const quiet = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
  "--disable-component-update", "--disable-sync"];
const { chromium: driver } = (await load("playwright-core")).default ?? (await load("playwright-core"));

const { page: file, steps, width, scheme } = JSON.parse(process.argv[2]);
const unwanted = ["--single-process", "--no-zygote", "--disable-web-security"];
const browser = await driver.launch({
  args: system ? quiet : chromium.args.filter((one) => !unwanted.includes(one)),
  executablePath: system ?? await chromium.executablePath(), headless: true,
});
const context = await browser.newContext({ viewport: { width, height: 900 }, colorScheme: scheme });
const page = await context.newPage();
// Asked from here: the page's policy forbids what playwright's own waiting evaluates in it. A reload may come between.
const until = async (expression) => {
  for (const end = Date.now() + 30000; ;) {
    if (await page.evaluate(expression).catch(() => false)) return;
    if (Date.now() > end) throw new Error("never true: " + expression);
    await new Promise((done) => setTimeout(done, 20));
  }
};
// Where a selector's element begins, in the window.
const place = async (selector) => { await page.locator(selector).first().scrollIntoViewIfNeeded(); return page.locator(selector).first().boundingBox(); };
const errors = [];
let requests = 0;
page.on("console", (message) => { if (["error", "warning"].includes(message.type())) errors.push(message.text()); });
page.on("pageerror", (error) => errors.push(String(error)));
page.on("request", (one) => { if (!one.url().startsWith("file://" + file)) requests += 1; });
const begun = Date.now();
await page.goto("file://" + file);
await page.waitForSelector("tbody tr");
await page.evaluate(() => new Promise((done) => requestAnimationFrame(() => setTimeout(done, 0))));
const ms = Date.now() - begun;
const values = [];
for (const [what, ...rest] of steps) {
  if (what === "eval") values.push(await page.evaluate(rest[0]));
  else if (what === "click") await page.click(rest[0]);
  else if (what === "fill") await page.fill(rest[0], rest[1]);
  else if (what === "hover") await page.hover(rest[0], { position: { x: rest[1], y: rest[2] } });
  else if (what === "drag") {
    const box = await place(rest[0]);
    await page.mouse.move(box.x + rest[1], box.y + box.height / 2);
    await page.mouse.down();
    await page.mouse.move(box.x + rest[2], box.y + box.height / 2, { steps: 5 });
    await page.mouse.up();
  } else if (what === "wheel") {
    const box = await place(rest[0]);
    await page.mouse.move(box.x + box.width / 2, box.y + box.height / 2);
    if (rest[2]) await page.keyboard.down("Control");
    await page.mouse.wheel(0, rest[1]);
    if (rest[2]) await page.keyboard.up("Control");
    await page.evaluate(() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done))));
  } else if (what === "axe") {
    await page.evaluate(readFileSync(require.resolve("axe-core/axe.min.js"), "utf8"));
    const found = await page.evaluate(() => axe.run());
    values.push(found.violations.flatMap((one) => one.nodes.map((node) => [one.impact, one.id, node.html.slice(0, 160)])));
  }
  else if (what === "scroll") await page.evaluate((y) => scrollTo(0, y), rest[0]);
  else if (what === "key") await page.keyboard.press(rest[0]);
  else if (what === "reload") { await page.reload(); await page.waitForSelector("tbody tr"); }
  else if (what === "wait") await until(rest[0]);
  else if (what === "shot") await page.screenshot({ path: rest[0], fullPage: !rest[1] });
  else throw new Error("no such step: " + what);
}
await browser.close();
console.log(JSON.stringify({ ms, errors, requests, values }));
